"""Rotary embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.bench.operations.operation import Maker, Operation
from tilewise.bench.problem import ITEM_BYTES


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotary embedding."""
    cos, sin = (torch.cat([t, t], -1).to(x.dtype) for t in (cos, sin))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@dataclass(frozen=True)
class Rope(Operation):
    heads: int = 1
    length: int = 1
    dim: int = 128

    op = "rope"
    passes = ("forward",)

    @property
    def flops(self) -> float:
        """Two products and a sum for each element of q and k."""
        return 6.0 * self.heads * self.length * self.dim

    @property
    def bytes(self) -> float:
        return 4.0 * ITEM_BYTES[self.dtype] * self.heads * self.length * self.dim

    def values(self, make: Maker) -> tuple[Any, ...]:
        q, k = (make.normal(1, self.heads, self.length, self.dim) for _ in range(2))
        return q, k, *tilewise.rope_tables(self.length, self.dim, device=make.device)

    def ours(self, kernel: str, *values: Any) -> Any:
        return tilewise.apply_rope(*values, kernel=kernel)

    def theirs(self, *values: Any) -> Any:
        q, k, cos, sin = values
        return turned(q, cos, sin), turned(k, cos, sin)
