"""Random tensors of a problem, and which keys its queries see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.bench.problem import BLOCK, Problem

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Operands:
    q: Tensor  # [B, Hq, Sq, D]
    k: Tensor  # [B, Hkv, Sk, D]
    v: Tensor  # [B, Hkv, Sk, Dv]
    d_o: Tensor  # [B, Hq, Sq, Dv]
    mask: Tensor | None  # the additive or the padding one

    @staticmethod
    def random(problem: Problem, device: torch.device) -> Operands:
        p, dtype = problem, DTYPES[problem.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        q, k, v = normal(p.b, p.hq, p.sq, p.d), normal(p.b, p.hkv, p.sk, p.d), normal(p.b, p.hkv, p.sk, p.dv)
        mask = None
        if p.mask == "additive":
            mask = normal(p.sq, p.sk)
        elif p.mask == "padding":
            mask = (torch.arange(p.sk, device=device) < p.unpadded).expand(p.b, 1, 1, p.sk)
        grad = p.direction != "forward"
        for x in (q, k, v):
            x.requires_grad_(grad)
        return Operands(q, k, v, normal(p.b, p.hq, p.sq, p.dv), mask)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def bytes(self) -> int:
        """Of q, k and v: what has to be driven out of a cache between two calls."""
        return sum(x.numel() * x.element_size() for x in self.inputs)


def block_grid(problem: Problem, device: torch.device) -> Tensor:
    """bool [query blocks, key blocks]: which blocks the block mask keeps."""
    rows, columns = -(-problem.sq // BLOCK), -(-problem.sk // BLOCK)
    kept = [[problem.keeps_block(row, column) for column in range(columns)] for row in range(rows)]
    return torch.tensor(kept, device=device)


def visible(problem: Problem, device: torch.device, first: int = 0, last: int | None = None) -> Tensor | None:
    """bool [last - first, Sk]: what causal, window and block mask leave to these queries; None is all."""
    if not problem.causal and problem.window is None and problem.blocks >= 1:
        return None
    i = torch.arange(first, problem.sq if last is None else last, device=device)[:, None]
    j = torch.arange(problem.sk, device=device)
    position = i + problem.sk - problem.sq
    seen = torch.ones(len(i), problem.sk, dtype=torch.bool, device=device)
    if problem.causal:
        seen &= j <= position
    if problem.window is not None:
        seen &= (j - position).abs() <= problem.window
    if problem.blocks < 1:
        seen &= block_grid(problem, device)[i // BLOCK, j // BLOCK]
    return seen
