"""Norms of rows: rms, layer, and rms after a residual add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

import tilewise
from tilewise.bench.operations.operation import Maker, Operation
from tilewise.bench.problem import ITEM_BYTES

EPS = 1e-5
# For each element: FLOPs forward and backward, and how often rows are read or written, forward and backward.
_FLOPS = {"rms": (4, 10), "layer": (7, 12), "residual": (5, 10)}
_ROWS = {"rms": (2, 3), "layer": (2, 3), "residual": (4, 3)}


@dataclass(frozen=True)
class Norm(Operation):
    kind: str = "rms"
    rows: int = 1
    dim: int = 1

    op = "norm"
    choices = {"kind": ("rms", "layer", "residual")}  # noqa: RUF012

    @property
    def flops(self) -> float:
        return float(self.rows * self.dim * self._of(_FLOPS[self.kind]))

    @property
    def bytes(self) -> float:
        return float(ITEM_BYTES[self.dtype] * self.rows * self.dim * self._of(_ROWS[self.kind]))

    def _of(self, counts: tuple[int, int]) -> int:
        forward, backward = counts
        return {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]

    def values(self, make: Maker) -> tuple[Any, ...]:
        more = {"rms": (), "layer": (self.dim,), "residual": (self.rows, self.dim)}[self.kind]
        return (
            make.normal(self.rows, self.dim),
            make.normal(self.dim),
            *([make.normal(*more)] if more else []),
        )

    def ours(self, kernel: str, *values: Any) -> Any:
        x, weight, *more = values
        if self.kind == "layer":
            return tilewise.layer_norm(x, weight, more[0], EPS, kernel=kernel)
        return tilewise.rms_norm(x, weight, EPS, residual=more[0] if more else None, kernel=kernel)

    def theirs(self, *values: Any) -> Any:
        x, weight, *more = values
        if self.kind == "layer":
            return F.layer_norm(x, (self.dim,), weight, more[0], EPS)
        summed = x + more[0] if more else x
        out = F.rms_norm(summed, (self.dim,), weight, EPS)
        return (out, summed) if more else out
