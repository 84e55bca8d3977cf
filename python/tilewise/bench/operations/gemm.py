"""A matrix product: x [M, K] by a weight [N, K]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import _layer_ops
from tilewise.bench.implementations import verdicts
from tilewise.bench.operands import DTYPES
from tilewise.bench.operations.operation import PRODUCTS, Maker, Operation, usable
from tilewise.bench.problem import ITEM_BYTES


@dataclass(frozen=True)
class Gemm(Operation):
    m: int = 1
    n: int = 1
    k: int = 1

    op = "gemm"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * PRODUCTS[self.direction]

    @property
    def bytes(self) -> float:
        """Factors and result; backward reads those and writes gradients as large as the factors."""
        factors, result = self.m * self.k + self.n * self.k, self.m * self.n
        forward, backward = factors + result, 2 * factors + result
        moved = {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]
        return ITEM_BYTES[self.dtype] * moved

    def values(self, make: Maker) -> tuple[Any, ...]:
        return make.normal(self.m, self.k), make.weight(self.n, self.k)

    def output_shape(self, values: tuple[Any, ...]) -> tuple[int, ...]:
        return self.m, self.n

    def ours(self, kernel: str, *values: Any) -> Tensor:
        return tilewise.linear(*values, kernel=kernel)

    def theirs(self, *values: Any) -> Tensor:
        return F.linear(*values)

    @classmethod
    def kernels(cls, device: torch.device) -> list[str]:
        makers = [Maker(device, dtype) for dtype in DTYPES.values()]
        shapes = [(rows, make) for rows in (16, 256) for make in makers]
        return usable(cls._explain(make.normal(rows, 256), make.normal(256, 256)) for rows, make in shapes)

    def chosen(self, device: torch.device) -> str:
        return next(
            k for k, said in self._explain(*self.arguments(device).values).items() if said == "chosen"
        )

    @staticmethod
    def _explain(x: Tensor, weight: Tensor) -> dict[str, str]:
        return verdicts(_layer_ops.explain_gemm(x, weight))
