"""Attention with what only FlexAttention has besides: sinks, softcap, ALiBi, masks by ranges, a pair bias."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.bench.implementations import compiled_flex
from tilewise.bench.operations.operation import Arguments, Maker, Operation
from tilewise.bench.problem import ITEM_BYTES, BadInput

FLEX = "torch flex"
SOFTCAP, KERNEL = 50.0, 13  # Gemma 2's; points to a side of a neighbourhood
_CAUSAL = ("sinks", "softcap", "alibi", "documents")


@dataclass(frozen=True)
class MaskedAttention(Operation):
    """Square attention. A pair bias has `batch` rows, all others are causal but for neighbourhoods."""

    kind: str = "sinks"
    batch: int = 1
    heads: int = 1
    length: int = 1
    dim: int = 64

    op = "masked-attention"
    choices = {"kind": (*_CAUSAL, "neighbourhood", "pair-bias")}  # noqa: RUF012
    defaults = {"batch": 1}  # noqa: RUF012

    def __post_init__(self) -> None:
        if self.kind == "neighbourhood" and (self.side**2 != self.length or self.side < KERNEL):
            raise BadInput(f"length: expected a square of {KERNEL} or above, got {self.length}")

    @property
    def side(self) -> int:
        """Of an image."""
        return math.isqrt(self.length)

    @property
    def documents(self) -> list[int]:
        """Lengths from 128 to 4096 tokens, about as many of each octave, always the same."""
        draw, lengths, left = random.Random(self.length), [], self.length
        while left:
            lengths.append(min(left, int(2 ** draw.uniform(7, 12))))
            left -= lengths[-1]
        return lengths

    # Work

    @property
    def pairs(self) -> float:
        """Of query and key that are seen, in one head."""
        if self.kind == "documents":
            return sum(n * n for n in self.documents) / 2
        if self.kind == "neighbourhood":
            return self.length * KERNEL**2
        return self.length**2 / (2 if self.kind in _CAUSAL else 1)

    @property
    def flops(self) -> float:
        passes = {"forward": 1, "backward": 2.5, "both": 3.5}[self.direction]
        return 4.0 * self.batch * self.heads * self.pairs * self.dim * passes

    @property
    def bytes(self) -> float:
        rows = 4 * self.batch * self.heads * self.length * self.dim  # q, k, v and o, or their gradients
        bias = self.heads * self.length**2 if self.kind == "pair-bias" else 0
        moved = {"forward": 1, "backward": 2, "both": 3}[self.direction]
        return float(ITEM_BYTES[self.dtype] * (rows + bias) * moved)

    # Calls

    def values(self, make: Maker) -> tuple[Any, ...]:
        q, k, v = (make.normal(self.batch, self.heads, self.length, self.dim) for _ in range(3))
        if self.kind == "sinks":
            return q, k, v, torch.randn(self.heads, device=make.device)
        if self.kind == "pair-bias":
            mask = torch.rand(self.batch, self.length, device=make.device) < 0.9
            mask[:, 0] = True
            return q, k, v, make.normal(1, self.heads, self.length, self.length), mask
        return q, k, v

    def ours(self, kernel: str, *values: Any) -> Any:
        q, k, v, *more = values
        if self.kind == "pair-bias":
            given = (x.unsqueeze(0) for x in (q, k, v, more[0], more[1][:, None, None]))
            return tilewise.triangle_attention(*given, kernel=kernel)[0]
        options: dict[str, Any] = {"kernel": kernel}
        if self.kind in ("documents", "neighbourhood"):
            options["block_mask"] = _block_mask(self, q.device)
        elif self.kind == "softcap":
            options |= {"softcap": SOFTCAP, "is_causal": True}
        elif self.kind == "alibi":
            options |= {"alibi_slopes": _slopes(self.heads, q.device), "is_causal": True}
        else:
            options |= {"sinks": more[0], "is_causal": True}
        return tilewise.attention(q, k, v, **options)

    def theirs(self, *values: Any) -> Any:
        """By SDPA where a mask says it; scores in memory where none does; documents one after another."""
        q, k, v, *more = values
        if self.kind == "documents":
            parts = zip(*(x.split(self.documents, 2) for x in (q, k, v)), strict=True)
            attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
            return torch.cat([attend(*part) for part in parts], 2)
        if self.kind == "neighbourhood":
            return F.scaled_dot_product_attention(q, k, v, _dense_mask(self, q.device))
        position = torch.arange(self.length, device=q.device)
        distance = position[:, None] - position
        if self.kind == "pair-bias":
            bias, mask = more
            return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~mask[:, None, None], -torch.inf))
        if self.kind == "alibi":
            bias = (-_slopes(self.heads, q.device)[:, None, None] * distance).to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(distance < 0, -torch.inf))
        score = q @ k.transpose(-2, -1) * self.dim**-0.5
        if self.kind == "softcap":
            score = SOFTCAP * torch.tanh(score / SOFTCAP)
        score = score.masked_fill(distance < 0, -torch.inf)
        if self.kind == "sinks":
            sink = more[0].to(score.dtype)[None, :, None, None].expand(*score.shape[:3], 1)
            return torch.softmax(torch.cat([score, sink], -1), -1)[..., :-1] @ v
        return torch.softmax(score, -1) @ v


@functools.lru_cache(maxsize=2)
def _slopes(heads: int, device: torch.device) -> Tensor:
    return 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=device))


@functools.lru_cache(maxsize=2)
def _block_mask(problem: MaskedAttention, device: torch.device) -> tilewise.BlockMask:
    if problem.kind == "documents":
        return tilewise.masks.documents(problem.documents, causal=True, device=device)
    return tilewise.masks.neighbourhood((problem.side, problem.side), KERNEL, device=device)


@functools.lru_cache(maxsize=1)
def _dense_mask(problem: MaskedAttention, device: torch.device) -> Tensor:
    return _block_mask(problem, device).to_dense()


# FlexAttention


def _seen(problem: MaskedAttention, device: torch.device) -> Callable[..., Any]:
    """FlexAttention's mask_mod of what all rows of a problem have in common."""
    if problem.kind == "documents":
        lengths = torch.tensor(problem.documents, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        return lambda b, h, i, j: (j <= i) & (document[i] == document[j])
    if problem.kind == "neighbourhood":
        side, last = problem.side, problem.side - KERNEL

        def near(i: Any, j: Any) -> Any:
            first = torch.clamp(i - KERNEL // 2, 0, last)
            return (j >= first) & (j < first + KERNEL)

        return lambda b, h, i, j: near(i // side, j // side) & near(i % side, j % side)
    return lambda b, h, i, j: j <= i


@functools.lru_cache(maxsize=1)
def _flex_mask(problem: MaskedAttention, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    length = problem.length
    return create_block_mask(_seen(problem, device), None, None, length, length, device=str(device))


def bind_flex(problem: MaskedAttention, arguments: Arguments) -> Callable[[], Any]:
    """Compiled FlexAttention. A mask by row is a part of its score, as its block mask would be one a row."""
    q, k, v, *more = arguments.values
    flex = compiled_flex()
    if problem.kind == "pair-bias":
        bias, mask = more

        def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return torch.where(mask[b, j], score + bias[0, h, i, j], -torch.inf)

        return functools.partial(flex, q, k, v, score_mod=biased)
    mask = _flex_mask(problem, q.device)
    if problem.kind == "sinks":
        sinks = more[0]

        def with_sinks() -> Tensor:
            out, lse = flex(q, k, v, block_mask=mask, return_lse=True)
            return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(out.dtype)

        return with_sinks
    slopes = _slopes(problem.heads, q.device)
    score_mods: dict[str, Any] = {
        "softcap": lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP),
        "alibi": lambda score, b, h, i, j: score - slopes[h] * (i - j),
    }
    return functools.partial(flex, q, k, v, score_mod=score_mods.get(problem.kind), block_mask=mask)
