"""Attention of single pieces, and how their results are joined. Rows are [B, H, S, D] throughout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.distributed.blocks import Blocks
from tilewise.distributed.plan import Pair, Rows

_forward = torch.ops.tilewise.attention_piece.default
_backward = torch.ops.tilewise.attention_piece_backward.default


@dataclass(frozen=True)
class Heads:
    """Which heads of the whole are here, and in which runs queries share them evenly."""

    first: int
    count: int
    whole: int  # query heads of the whole
    group: int  # of them share a key head

    @property
    def first_key(self) -> int:
        return self.first // self.group

    @property
    def keys(self) -> slice:
        """The key heads of the whole that are needed."""
        end = -(-(self.first + self.count) // self.group)
        return slice(self.first_key, end if self.count else self.first_key)

    @property
    def at(self) -> slice:
        return slice(self.first, self.first + self.count)

    def of_whole(self, here: slice) -> slice:
        """Heads of the whole that are these heads here."""
        return slice(self.first + here.start, self.first + here.stop)

    def parts(self, count: int) -> list[Heads]:
        """At most `count` parts, as even as it goes: key heads with the queries that share them."""
        keys = self.keys
        number = keys.stop - keys.start
        count = max(1, min(count, number))
        cuts = (self.group * (keys.start + number * n // count) for n in range(count + 1))
        ends = [min(max(cut, self.first), self.first + self.count) for cut in cuts]
        return [replace(self, first=begin, count=end - begin) for begin, end in pairwise(ends)]

    def places(self, part: Heads) -> tuple[slice, slice]:
        """Where a part's queries and keys stand here."""
        first, keys = part.first - self.first, part.keys
        first_key, end_key = keys.start - self.first_key, keys.stop - self.first_key
        return slice(first, first + part.count), slice(first_key, end_key)

    def runs(self) -> list[tuple[slice, slice]]:
        """Heads here of queries and keys: whole groups together, a group that is cut by itself."""
        found: list[tuple[slice, slice]] = []
        head, end = self.first, self.first + self.count
        while head < end:
            whole = head % self.group == 0 and end - head >= self.group
            stop = end - end % self.group if whole else min(end, head - head % self.group + self.group)
            key = head // self.group - self.first_key
            keys = (stop - head) // self.group if whole else 1
            found.append((slice(head - self.first, stop - self.first), slice(key, key + keys)))
            head = stop
        return found


@dataclass(frozen=True)
class Problem:
    """What all pieces of a call have in common."""

    heads: Heads
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each document
    packed: bool  # documents are sequences of one batch entry, not parts of every one
    settings: tuple[tuple[str, Any], ...]  # attention's other options, as the operator calls them
    seed: tuple[int, int] | None
    blocks: Blocks | None = None

    def with_heads(self, heads: Heads) -> Problem:
        return replace(self, heads=heads)

    def place(self, pair: Pair, head: int) -> list[int]:
        q, k = pair.q, pair.k
        length_q, length_k = self.lengths[q.document]
        entry = q.document if self.packed else 0
        return [
            q.begin,
            k.begin,
            pair.step,
            length_q,
            length_k,
            entry,
            self.heads.first + head,
            self.heads.whole,
        ]


@dataclass
class Inputs:
    """Tensors of a call: rows, and what is added to their scores."""

    q: Tensor
    mask: Tensor | None = None  # these queries, and all keys in the order of the whole
    slopes: Tensor | None = None  # of all heads, [Hq] or [B or documents, Hq]
    sinks: Tensor | None = None  # [Hq], of all heads
    logit_scale: Tensor | None = None  # [Hq], of all heads

    def of_heads(self, heads: slice) -> Inputs:
        mask = None if self.mask is None else mask_of_heads(self.mask, heads)
        return replace(self, q=self.q[:, heads], mask=mask)

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def statistics(self) -> torch.dtype:
        """Of a piece's lse and delta. The CUDA kernels with 16-bit products take f32.

        That is enough for them, but not where ALiBi or a mask makes lse large.
        """
        halves = self.q.dtype in (torch.float16, torch.bfloat16)
        added = self.slopes is not None or (self.mask is not None and self.mask.is_floating_point())
        return torch.float32 if self.q.is_cuda and halves and not added else torch.float64


def mask_of_heads(mask: Tensor, heads: slice) -> Tensor:
    """[B, H, Sq, Sk] of a mask, or of its gradient."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask if mask.shape[1] == 1 else mask[:, heads]


def _mask_of(mask: Tensor, pair: Pair, heads: slice) -> Tensor:
    """The part of a mask, or of its gradient, that a pair is added to."""
    mask, k = mask_of_heads(mask, heads), pair.k
    keys = slice(k.begin, k.last + 1, k.step) if k.count else slice(0, 0)
    if mask.shape[2] != 1:
        mask = mask[:, :, pair.q_rows]
    return mask if mask.shape[3] == 1 else mask[..., keys]


def _mask_inside(problem: Problem, inputs: Inputs, pair: Pair, heads: slice) -> Tensor | None:
    """What a pair is given as its mask: its part of the mask, and what the block mask hides."""
    mask = None if inputs.mask is None else _mask_of(inputs.mask, pair, heads)
    if not pair.hidden or problem.blocks is None:
        return mask
    seen = problem.blocks.of_piece(pair.q, pair.k, problem.heads.of_whole(heads))
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)


def _options(problem: Problem, inputs: Inputs, pair: Pair, heads: slice) -> dict[str, Any]:
    of_whole = problem.heads.of_whole(heads)
    slopes = inputs.slopes
    if slopes is not None and slopes.dim() == 2 and problem.packed:
        slopes = slopes[pair.q.document]
    return dict(
        problem.settings,
        attn_mask=_mask_inside(problem, inputs, pair, heads),
        alibi_slopes=None if slopes is None else slopes[..., of_whole],
        logit_scale=None if inputs.logit_scale is None else inputs.logit_scale[of_whole],
        dropout_seed=None if problem.seed is None else torch.tensor(problem.seed, dtype=torch.int64),
    )


def _sinks(problem: Problem, inputs: Inputs, heads: slice) -> Tensor | None:
    return None if inputs.sinks is None else inputs.sinks[problem.heads.of_whole(heads)]


class Joined:
    """Rows of which every piece has seen some keys: o and lse so far, neither rounded to the rows' type."""

    def __init__(self, inputs: Inputs, dim: int) -> None:
        rows = inputs.q.shape[:3]
        self.o = inputs.q.new_zeros((*rows, dim), dtype=inputs.wide)
        self.lse = inputs.q.new_full(rows, -torch.inf, dtype=torch.float64)

    def attend(self, problem: Problem, inputs: Inputs, k: Tensor, v: Tensor, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            for heads, keys in problem.heads.runs():
                o, lse = _forward(
                    problem.place(pair, heads.start),
                    True,
                    inputs.statistics == torch.float64,
                    *(inputs.q[:, heads, pair.q_rows], k[:, keys, pair.k_rows], v[:, keys, pair.k_rows]),
                    **_options(problem, inputs, pair, heads),
                )
                self._join((slice(None), heads, pair.q_rows), o, lse.double())
                del o, lse  # before the next piece has results

    def add_sinks(self, problem: Problem, inputs: Inputs) -> None:
        if inputs.sinks is not None:
            sinks = inputs.sinks[problem.heads.at].double()[:, None]
            self._join((slice(None),), torch.zeros((), dtype=self.o.dtype, device=self.o.device), sinks)

    def _join(self, at: tuple[slice, ...], o: Tensor, lse: Tensor) -> None:
        before = self.lse[at]
        joined = torch.logaddexp(before, lse)
        unseen = joined == -torch.inf
        kept, added = (
            torch.where(unseen, 0.0, torch.exp(x - joined)).to(o.dtype).unsqueeze(-1) for x in (before, lse)
        )
        self.o[at].mul_(kept).addcmul_(o, added)
        self.lse[at] = joined


def _delta(grad_out: Tensor, o: Tensor) -> Tensor:
    """Σ grad_out·o of each row, in f64: one head after another, as products of all would take much memory."""
    heads = zip(grad_out.unbind(1), o.unbind(1), strict=True)
    sums = [(grad.double() * rows.double()).sum(-1) for grad, rows in heads]
    return torch.stack(sums, 1) if sums else o.new_zeros(o.shape[:3], dtype=torch.float64)


@dataclass
class Sums:
    """Gradients of what pieces or heads have in common. Each adds its own."""

    mask: Tensor | None  # [B, H, Sq, Sk], in f32 or wider
    sinks: Tensor | None  # of all heads, as logit_scale's; both in f64
    logit_scale: Tensor | None

    @staticmethod
    def of(inputs: Inputs, mask_gradient: bool) -> Sums:
        def zeros(like: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if like is None else torch.zeros_like(like, dtype=dtype)

        of_heads = (zeros(x, torch.float64) for x in (inputs.sinks, inputs.logit_scale))
        return Sums(zeros(inputs.mask if mask_gradient else None, inputs.wide), *of_heads)

    def of_heads(self, heads: slice) -> Sums:
        return self if self.mask is None else replace(self, mask=mask_of_heads(self.mask, heads))


@dataclass
class Shares:
    """Gradients of rows, summed piece by piece in f32 or wider.

    Of rows that pieces share there is delta, computed from o before its rounding. Rows that find all keys in
    one piece have out instead.
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None
    dq: Tensor
    sums: Sums

    @staticmethod
    def of(
        inputs: Inputs,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        sums: Sums,
        whole: bool = False,
    ) -> Shares:
        (o, lse), (grad_out, grad_lse) = saved, grads
        out, delta = (o, None) if whole else (None, _delta(grad_out, o))
        dq = torch.zeros_like(inputs.q, dtype=inputs.wide)
        return Shares(grad_out, grad_lse, out, lse, delta, dq, sums)

    def differentiate(
        self,
        problem: Problem,
        inputs: Inputs,
        k: Tensor,
        v: Tensor,
        pairs: Iterable[Pair],
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Adds the gradients of the pairs; dk and dv stand beside k and v."""
        whole, sums = self.delta is None, self.sums
        dtype = inputs.wide if whole else inputs.statistics
        dsinks = sums.sinks if whole else None
        needed = [True, True, True, *(x is not None for x in (sums.mask, dsinks, sums.logit_scale))]
        for pair in pairs:
            for heads, keys in problem.heads.runs():
                q_at, k_at = (slice(None), heads, pair.q_rows), (slice(None), keys, pair.k_rows)
                found = iter(
                    _backward(
                        self.grad_out[q_at],
                        None if self.grad_lse is None else self.grad_lse[q_at].to(dtype),
                        None if self.out is None else self.out[q_at],
                        self.lse[q_at].to(dtype),
                        None if self.delta is None else self.delta[q_at].to(dtype),
                        needed,
                        problem.place(pair, heads.start),
                        True,
                        False,
                        *(inputs.q[q_at], k[k_at], v[k_at]),
                        sinks=_sinks(problem, inputs, heads) if whole else None,
                        **_options(problem, inputs, pair, heads),
                    )
                )
                self.dq[q_at] += next(found)
                dk[k_at] += next(found)
                dv[k_at] += next(found)
                if sums.mask is not None:
                    total = _mask_of(sums.mask, pair, heads)
                    total += next(found).sum_to_size(total.shape)  # a block mask's entries and heads
                for of_heads in (dsinks, sums.logit_scale):
                    if of_heads is not None:
                        of_heads[problem.heads.of_whole(heads)] += next(found)
                del found  # before the next piece has results

    def add_sinks(self, problem: Problem, inputs: Inputs) -> None:
        """The gradients of sinks, which no piece has seen."""
        if inputs.sinks is None or self.sums.sinks is None or self.delta is None:
            return
        sinks = inputs.sinks[problem.heads.at].double()[:, None]
        weight = torch.where(self.lse == -torch.inf, 0.0, torch.exp(sinks - self.lse))
        shift = -self.delta if self.grad_lse is None else self.grad_lse.double() - self.delta
        self.sums.sinks[problem.heads.at] += (weight * shift).sum((0, 2))


# Rows that find all their keys in one piece need no joining: they are attention itself.


def whole_pairs(queries: Sequence[Rows], pairs: Sequence[Pair]) -> list[Pair] | None:
    """One pair for every run of queries, all of it; None where some have several."""
    found = []
    for q in queries:
        own = [pair for pair in pairs if pair.q.document == q.document and _inside(pair.q_rows, q)]
        if len(own) > 1 or (own and own[0].q.step != q.step and own[0].q.count > 1):
            return None
        nothing = Rows(0, 0, q.document, 0, 1)
        k_rows, k = (own[0].k_rows, own[0].k) if own else (slice(0, 0), nothing)
        found.append(Pair(q.at, k_rows, q, k))
    return found


def _inside(rows: slice, q: Rows) -> bool:
    return q.first <= rows.start < q.first + q.count


def attend_whole(
    problem: Problem, inputs: Inputs, k: Tensor, v: Tensor, pairs: Sequence[Pair]
) -> tuple[Tensor, Tensor]:
    """out in the rows' type, and lse."""
    out = inputs.q.new_zeros((*inputs.q.shape[:3], v.shape[-1]))
    lse = inputs.q.new_full(inputs.q.shape[:3], -torch.inf, dtype=inputs.wide)
    for pair in pairs:
        for heads, keys in problem.heads.runs():
            at = (slice(None), heads, pair.q_rows)
            out[at], lse[at] = _forward(
                problem.place(pair, heads.start),
                False,
                False,
                *(inputs.q[at], k[:, keys, pair.k_rows], v[:, keys, pair.k_rows]),
                sinks=_sinks(problem, inputs, heads),
                **_options(problem, inputs, pair, heads),
            )
    return out, lse
