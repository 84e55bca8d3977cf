"""Which tokens of a sequence each rank has. A layout is data: spans of tokens for every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tilewise._errors import reject
from tilewise._scalars import at_least, whole_of


@dataclass(frozen=True)
class Span:
    """Tokens begin, begin + step, … before end."""

    begin: int
    end: int
    step: int = 1

    @property
    def positions(self) -> range:
        return range(self.begin, self.end, self.step)


@dataclass(frozen=True)
class Layout:
    """For each rank the spans of tokens that its local tensors hold, in the order in which they hold them.

    Every token belongs to one rank. Ranks may have different numbers of tokens, or none.

    >>> zigzag(8, 2).ranks
    ((Span(begin=0, end=2, step=1), Span(begin=6, end=8, step=1)), (Span(begin=2, end=6, step=1),))
    >>> zigzag(8, 2).positions(0)
    tensor([0, 1, 6, 7])
    """

    length: int
    ranks: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            reject("layout", "one rank or more", "none")
        for span in (span for spans in self.ranks for span in spans):
            if span.step < 1 or span.begin < 0:
                reject("layout", "spans that start at 0 or above, in steps of 1 or more", span)
        if not torch.equal(self.order.sort().values, torch.arange(self.length)):
            reject("layout", f"each of {self.length} tokens on exactly one rank", "another distribution")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(len(span.positions) for span in spans) for spans in self.ranks)

    @cached_property
    def order(self) -> Tensor:
        """Positions of all tokens, rank after rank."""
        return torch.cat([self.positions(rank) for rank in range(len(self.ranks))])

    def positions(self, rank: int) -> Tensor:
        """Where the rank's tokens stand in the sequence: what rotary embeddings want to know."""
        if not 0 <= whole_of("rank", rank) < len(self.ranks):
            reject("rank", f"one of the {len(self.ranks)} ranks, counted from 0", rank)
        spans = self.ranks[rank]
        parts = [torch.arange(span.begin, max(span.end, span.begin), span.step) for span in spans]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _layout(length: int, ranks: Iterable[Iterable[Span]]) -> Layout:
    return Layout(length, tuple(_joined(spans) for spans in ranks))


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Without empty spans, and with neighbours as one."""
    found: list[Span] = []
    for span in spans:
        if not span.positions:
            continue
        if found and span.step == 1 and found[-1].step == 1 and found[-1].end == span.begin:
            found[-1] = Span(found[-1].begin, span.end)
        else:
            found.append(span)
    return tuple(found)


def _cuts(begin: int, end: int, parts: int) -> list[Span]:
    """As even as it goes, the longer ones first."""
    short, longer = divmod(end - begin, parts)
    ends = accumulate((short + (n < longer) for n in range(parts)), initial=begin)
    return [Span(a, b) for a, b in pairwise(ends)]


def _starts_of(cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    starts = [int(whole_of(f"cu_seqlens[{n}]", start)) for n, start in enumerate(cu_seqlens)]
    if not starts or starts[0] != 0 or starts != sorted(starts):
        reject("cu_seqlens", "a first entry of 0 and entries that do not decrease", starts)
    return starts


def contiguous(length: int, ranks: int) -> Layout:
    """One run of tokens after another: for attention without a band, or with a window."""
    at_least(0, length=length)
    at_least(1, ranks=ranks)
    return _layout(length, ([span] for span in _cuts(0, length, ranks)))


def zigzag(length: int, ranks: int) -> Layout:
    """A run from the start and one from the end for each rank: causal attention is the same work for all."""
    at_least(0, length=length)
    return documents((0, length), ranks)


def striped(length: int, ranks: int) -> Layout:
    """Every ranks-th token: causal attention is the same work for all, in every step."""
    at_least(0, length=length)
    at_least(1, ranks=ranks)
    return _layout(length, ([Span(rank, length, ranks)] for rank in range(ranks)))


def documents(cu_seqlens: Sequence[int] | Tensor, ranks: int) -> Layout:
    """Packed documents, each of them in zigzag."""
    at_least(1, ranks=ranks)
    starts = _starts_of(cu_seqlens)
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for begin, end in pairwise(starts):
        cuts = _cuts(begin, end, 2 * ranks)
        for rank in range(ranks):
            spans[rank] += (cuts[rank], cuts[2 * ranks - 1 - rank])
    return _layout(starts[-1], spans)


def balanced(pairs: Sequence[int], block: int, length: int, ranks: int) -> Layout:
    """Blocks of queries by the pairs of queries and keys that are to be computed for them.

    `pairs[n]` counts those of tokens n·block to (n + 1)·block. The blocks with the most are dealt out first,
    forth and back, so that all ranks have about as many tokens and as many pairs.
    """
    at_least(0, length=length)
    at_least(1, block=block, ranks=ranks)
    blocks = -(-length // block)
    if len(pairs) != blocks:
        reject("pairs", f"one number for each of {blocks} blocks", f"{len(pairs)}")
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for place, n in enumerate(sorted(range(blocks), key=lambda n: (-pairs[n], n))):
        turn, rank = divmod(place, ranks)
        dealt = spans[ranks - 1 - rank if turn % 2 else rank]
        dealt.append(Span(n * block, min((n + 1) * block, length)))
    return _layout(length, (sorted(of_rank, key=lambda span: span.begin) for of_rank in spans))


def count_pairs(
    length: int,
    block: int,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> list[int]:
    """The pairs that a band, and documents, leave to each block of queries: what `balanced` takes.

    >>> count_pairs(8, 4, is_causal=True)
    [10, 26]
    """
    at_least(0, length=length)
    at_least(1, block=block)
    cumulative = [0, length] if cu_seqlens is None else _starts_of(cu_seqlens)
    if cumulative[-1] != length:
        reject("cu_seqlens", f"a last entry of {length}, the length", cumulative[-1])
    if length == 0:
        return []
    position, starts = torch.arange(length), torch.tensor(cumulative)
    owner = torch.searchsorted(starts, position, right=True) - 1
    left, right = (None, None) if window is None else window
    first, last = starts[owner], starts[owner + 1] - 1
    if is_causal or right is not None:
        last = torch.minimum(last, position + (0 if is_causal else right or 0))
    if left is not None:
        first = torch.maximum(first, position - left)
    counts = (last - first + 1).clamp(min=0)
    return [int(part.sum()) for part in counts.split(block)]


BY_NAME = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def layout_of(layout: Layout | str, lengths: Sequence[int]) -> Layout:
    """The layout itself, or the one of that name, of ranks with so many tokens.

    "contiguous" takes any number of them, as DTensor cuts otherwise than `contiguous`.
    """
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str) or layout not in BY_NAME:
        reject("layout", f"a Layout or one of {', '.join(map(repr, BY_NAME))}", repr(layout))
    if layout == "contiguous":
        ends = accumulate(lengths, initial=0)
        return _layout(sum(lengths), ([Span(begin, end)] for begin, end in pairwise(ends)))
    return BY_NAME[layout](sum(lengths), len(lengths))
