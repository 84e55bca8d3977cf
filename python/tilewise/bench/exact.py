"""Errors against float64: the reference on whole heads, in pieces that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise import reference
from tilewise.bench.operands import DTYPES, Operands, visible
from tilewise.bench.problem import Problem

Group = tuple[int, int]  # an entry and one of its key heads, with all query heads that share it
ROUNDING = (
    "mma",
    "wgmma",
    "wgmma_halves",
)  # kernels that round what goes into products of f16 and bf16
MOST_GROUPS = 16  # one after another; a GPU is far from busy with the short ones
NAMES = {"forward": ("o",), "backward": ("dq", "dk", "dv"), "both": ("o", "dq", "dk", "dv")}


@dataclass(frozen=True)
class Error:
    """Of one result: largest, mean and root-mean-square error, and how large the exact values are."""

    largest: float
    mean: float
    rms: float
    exact_largest: float
    exact_rms: float

    @property
    def relative(self) -> float:
        """The error's norm over that of the exact result."""
        return self.rms / self.exact_rms if self.exact_rms else self.rms


def groups_within(problem: Problem, flops: float) -> list[Group]:
    """Groups spread over entries and heads, as many as the FLOPs allow, but one at least."""
    count = problem.b * problem.hkv
    checked = max(1, min(count, MOST_GROUPS, int(flops * count / max(problem.flops, 1))))
    return [divmod(n * count // checked, problem.hkv) for n in range(checked)]


def of_groups(result: Tensor, groups: Sequence[Group], hkv: int) -> Tensor:
    """[groups, heads of a group, S, D] of a result [B, H, S, D]."""
    per_group = result.shape[1] // hkv
    return torch.stack([result[b, h * per_group : (h + 1) * per_group] for b, h in groups])


def compute(
    problem: Problem, operands: Operands, groups: Sequence[Group], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The pass's results for the groups, computed in `dtype` by `tilewise.reference`."""
    parts = [_group(problem, operands, group, dtype) for group in groups]
    return [torch.stack(tensors) for tensors in zip(*parts, strict=True)]


def _group(problem: Problem, operands: Operands, group: Group, dtype: torch.dtype) -> list[Tensor]:
    """[heads of the group, S, D] of each result, by pieces of queries: sums over these give dk and dv."""
    b, h = group
    shared = problem.hq // problem.hkv
    heads = slice(h * shared, (h + 1) * shared)
    device = operands.q.device
    q, d_o = (x[b : b + 1, heads].detach().to(dtype) for x in (operands.q, operands.d_o))
    k, v = (x[b : b + 1, h : h + 1].detach().to(dtype) for x in (operands.k, operands.v))
    backward = problem.direction != "forward"
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    outs, dqs = [], []
    attend: Callable[..., Tensor] = reference.attention
    elements = 2**26 if device.type == "cuda" else 2**22
    rows = max(1, elements // (shared * problem.sk))
    for first in range(0, problem.sq, rows):
        last = min(problem.sq, first + rows)
        leaves = tuple(x.detach().requires_grad_(backward) for x in (q[:, :, first:last], k, v))
        mask = _mask(problem, operands, b, first, last, dtype)
        out = attend(*leaves, mask, enable_gqa=True, dtype=dtype)
        outs.append(out.detach())
        if backward:
            dq, of_k, of_v = torch.autograd.grad(out, leaves, d_o[:, :, first:last])
            dqs.append(dq)
            dk += of_k
            dv += of_v
    results = {"o": torch.cat(outs, 2)}
    if backward:
        results |= {"dq": torch.cat(dqs, 2), "dk": dk, "dv": dv}
    return [results[name][0] for name in NAMES[problem.direction]]


def _mask(
    problem: Problem, operands: Operands, b: int, first: int, last: int, dtype: torch.dtype
) -> Tensor | None:
    seen = visible(problem, operands.q.device, first, last)
    if operands.mask is None:
        return seen
    if problem.mask == "padding":
        padding = operands.mask[b : b + 1]
        return padding if seen is None else padding & seen
    added = operands.mask[first:last].to(dtype)
    return added if seen is None else added.masked_fill(~seen, -torch.inf)


class SixteenBitProducts(TorchFunctionMode):
    """Rounds both factors of a product and what it gives to a type, and so their gradients.

    In f32 that is PyTorch with products of 16 bits: P, S and their gradients are rounded, softmax is not.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function not in (Tensor.matmul, Tensor.__matmul__, torch.matmul):
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            factors = [_rounded(x, self.dtype) for x in args]
            return _rounded(factors[0] @ factors[1], self.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)  # so are gradients on their way back


class Check:
    """A result's errors, on as many heads as there is time for."""

    def __init__(self, problem: Problem, operands: Operands, flops: float) -> None:
        self.problem, self.operands = problem, operands
        self.names = NAMES[problem.direction]
        self.groups = groups_within(problem, flops)
        self.about = f"{len(self.groups)} of {problem.b * problem.hkv} key heads"
        drawn = problem.dropout > 0  # every implementation draws a mask of its own
        self.exact = None if drawn else compute(problem, operands, self.groups)
        self._of_torch: dict[bool, list[Error]] = {}

    def __call__(self, results: Sequence[Tensor]) -> list[Error]:
        """None with dropout."""
        if self.exact is None:
            return []
        return errors([of_groups(x, self.groups, self.problem.hkv) for x in results], self.exact)

    def of_torch(self, kernel: str) -> list[Error]:
        """Of the path that a kernel is measured by, made once."""
        if self.exact is None:
            return []
        rounds = kernel in ROUNDING and self.problem.precision == "standard" and self.problem.dtype != "f32"
        if rounds not in self._of_torch:
            path = half_path if rounds else math_path
            self._of_torch[rounds] = errors(path(self.problem, self.operands, self.groups), self.exact)
        return self._of_torch[rounds]


def errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Error]:
    """Of each result, all of the same groups."""
    return [_error(x.double(), y.double()) for x, y in zip(results, exact, strict=True)]


def _error(result: Tensor, exact: Tensor) -> Error:
    difference = (result - exact).abs()
    figures = torch.stack(
        [
            difference.max(),  # a NaN stays
            difference.mean(),
            difference.square().mean().sqrt(),
            exact.abs().max(),
            exact.square().mean().sqrt(),
        ]
    )
    return Error(*figures.tolist())


def math_path(problem: Problem, operands: Operands, groups: Sequence[Group]) -> list[Tensor]:
    """What PyTorch's own arithmetic gives in the same precision: f32 throughout, rounded at the end."""
    return [x.to(DTYPES[problem.dtype]) for x in compute(problem, operands, groups, torch.float32)]


def half_path(problem: Problem, operands: Operands, groups: Sequence[Group]) -> list[Tensor]:
    """The same with products of 16 bits."""
    with SixteenBitProducts(DTYPES[problem.dtype]):
        return math_path(problem, operands, groups)


def within_contract(ours: Error, math: Error, epsilon: float) -> bool:
    """At most twice the error of PyTorch's arithmetic, and one rounding more; no single one may stand out."""
    mean = ours.rms <= 2 * math.rms + epsilon * ours.exact_rms
    largest = ours.largest <= 2 * math.largest + 8 * epsilon * ours.exact_largest
    return mean and largest  # false where there is a NaN
