"""What all operations around attention have in common as problems.

Ours and PyTorch's are functions of the same arguments: x first, then weights. PyTorch's in float64 is the
truth. A subclass has its sizes as fields.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.bench.operands import DTYPES
from tilewise.bench.problem import PASSES

KEPT = "products kept"  # ours, with a network's products kept for backward, as PyTorch does
PRODUCTS = {"forward": 1, "backward": 2, "both": 3}  # that a pass makes of each product


@dataclass
class Arguments:
    """A set of inputs."""

    values: tuple[Any, ...]  # what the functions are called with: tensors, a module, a cache
    inputs: tuple[Tensor, ...]  # what gradients are taken of
    d_o: Tensor | None

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in _tensors(self.values))


@dataclass(frozen=True)
class Operation:
    """A problem: sizes, type and pass."""

    suite: str = "shape"
    direction: str = "forward"
    dtype: str = "f32"

    op: ClassVar[str]
    passes: ClassVar[tuple[str, ...]] = PASSES
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}  # fields that are words, and the words they may be
    defaults: ClassVar[dict[str, Any]] = {}

    # Names

    @classmethod
    def size_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls) if field.name not in _COMMON)

    @property
    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.size_names()}

    @property
    def shape_option(self) -> str:
        """As `--shape` takes it."""
        return " ".join(f"{name}={value}" for name, value in {"op": self.op, **self.sizes}.items())

    def __str__(self) -> str:
        return f"{words(self.op, self.sizes)} {self.dtype} {self.direction}"

    def line(self) -> dict[str, Any]:
        """The part of a record's line that says what was measured."""
        return {
            **{"suite": self.suite, "op": self.op, "pass": self.direction, "dtype": self.dtype},
            **{"sizes": self.sizes, "causal": False, "features": ""},
        }

    # Work: what it takes at least

    @property
    def flops(self) -> float:
        raise NotImplementedError

    @property
    def bytes(self) -> float:
        raise NotImplementedError

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    # Calls

    def values(self, make: Maker) -> tuple[Any, ...]:
        """The functions' arguments, random."""
        raise NotImplementedError

    def ours(self, kernel: str, *values: Any) -> Any:
        """Results: a tensor or several. Gradients are taken through the first."""
        raise NotImplementedError

    def theirs(self, *values: Any) -> Any:
        raise NotImplementedError

    def output_shape(self, values: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(values[0].shape)

    @classmethod
    def kernels(cls, device: torch.device) -> list[str]:
        """Ours that take part, by name; "tilewise" is whatever is chosen."""
        return ["tilewise"]

    def chosen(self, device: torch.device) -> str:
        """Which of them a user would get."""
        return "tilewise"

    def arguments(self, device: torch.device) -> Arguments:
        make = Maker(device, DTYPES[self.dtype])
        values = self.values(make)
        if self.direction == "forward":
            return Arguments(values, (), None)
        return Arguments(values, _differentiable(values), make.normal(*self.output_shape(values)))


_COMMON = {field.name for field in fields(Operation)}


def words(op: str, sizes: dict[str, Any]) -> str:
    """
    >>> words("ffn", {"kind": "swiglu", "tokens": 512, "embed": 4096})
    'ffn swiglu tokens=512 embed=4096'
    """
    parts = [value if isinstance(value, str) else f"{name}={value}" for name, value in sizes.items()]
    return " ".join([op, *parts])


@dataclass(frozen=True)
class Maker:
    """Makes random tensors."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def weight(self, rows: int, columns: int) -> Tensor:
        """Of a product whose results are about as large as its inputs."""
        return self.normal(rows, columns, scale=columns**-0.5)


def usable(explanations: Iterable[dict[str, str]]) -> list[str]:
    """Kernels that take some of the problems explained, slowest first."""
    verdicts = [(kernel, verdict) for said in explanations for kernel, verdict in said.items()]
    able = [kernel for kernel, verdict in verdicts if verdict == "chosen" or verdict.startswith("able")]
    return [kernel for kernel in reversed(dict.fromkeys(kernel for kernel, _ in verdicts)) if kernel in able]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            yield from value.parameters()
        elif is_dataclass(value):
            yield from _tensors(getattr(value, field.name) for field in fields(value))


def _differentiable(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in _tensors(values) if x.is_floating_point())


def widened(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """A copy in another type."""
    values = tuple(_widened(value, dtype) for value in arguments.values)
    if not arguments.inputs:
        return Arguments(values, (), None)
    assert arguments.d_o is not None
    return Arguments(values, _differentiable(values), arguments.d_o.to(dtype))


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype) if value.is_floating_point() else value.clone()
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to(dtype)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _widened(getattr(value, field.name), dtype) for field in fields(value)}
        )
    return value
