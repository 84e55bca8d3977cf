"""A feed-forward network: up, GELU, down, or with a gate (SwiGLU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import _layer_ops
from tilewise.bench.implementations import CannotTake, verdicts
from tilewise.bench.operands import DTYPES
from tilewise.bench.operations.operation import KEPT, PRODUCTS, Maker, Operation, usable
from tilewise.bench.problem import ITEM_BYTES


@dataclass(frozen=True)
class Ffn(Operation):
    kind: str = "gelu"
    tokens: int = 1
    embed: int = 1
    hidden: int = 1

    op = "ffn"
    choices = {"kind": ("gelu", "swiglu")}  # noqa: RUF012

    @property
    def matrices(self) -> int:
        return 3 if self.kind == "swiglu" else 2

    @property
    def flops(self) -> float:
        """Of the products; what a backward computes anew is not counted."""
        products = 2.0 * self.matrices * self.tokens * self.embed * self.hidden
        return products * PRODUCTS[self.direction]

    @property
    def bytes(self) -> float:
        """Weights, x and the result; what lies between need not leave the chip."""
        weights, rows = self.matrices * self.embed * self.hidden, self.tokens * self.embed
        forward, backward = weights + 2 * rows, 2 * weights + 3 * rows
        moved = {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]
        return ITEM_BYTES[self.dtype] * moved

    def values(self, make: Maker) -> tuple[Any, ...]:
        up, down = make.weight(self.hidden, self.embed), make.weight(self.embed, self.hidden)
        gate = (make.weight(self.hidden, self.embed),) if self.kind == "swiglu" else ()
        return make.normal(self.tokens, self.embed), up, down, *gate

    def ours(self, kernel: str, *values: Any) -> Tensor:
        x, up, down, *gate = values
        if kernel == KEPT and self.direction == "forward":
            raise CannotTake("products are kept only for a backward pass")
        activation: Literal["silu", "gelu"] = "silu" if gate else "gelu"
        return tilewise.ffn(
            *(x, up, down),
            gate=gate[0] if gate else None,
            activation=activation,
            keep_products=kernel == KEPT,
            kernel="auto" if kernel == KEPT else kernel,
        )

    def theirs(self, *values: Any) -> Tensor:
        x, up, down, *gate = values
        if gate:
            return F.linear(F.silu(F.linear(x, gate[0])) * F.linear(x, up), down)
        return F.linear(F.gelu(F.linear(x, up)), down)

    @classmethod
    def kernels(cls, device: torch.device) -> list[str]:
        makers = [Maker(device, dtype) for dtype in DTYPES.values()]
        shapes = [(make.normal(rows, 256), make.normal(256, 256)) for rows in (16, 256) for make in makers]
        return [*usable(cls._explain(x, weight, weight) for x, weight in shapes), KEPT]

    def chosen(self, device: torch.device) -> str:
        return next(
            k for k, said in self._explain(*self.arguments(device).values).items() if said == "chosen"
        )

    @staticmethod
    def _explain(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None = None) -> dict[str, str]:
        return verdicts(_layer_ops.explain_ffn(x, up, down, gate))
