"""Which rows of queries meet which rows of keys. The host knows, from the layout, the band and blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tilewise._errors import reject
from tilewise.distributed.layout import Layout, Span

INFINITE = 1 << 62


@dataclass(frozen=True)
class Rows:
    """Rows first, first + 1, … of a tensor: tokens begin, begin + step, … of a document."""

    first: int
    count: int
    document: int
    begin: int
    step: int

    @property
    def last(self) -> int:
        """The position of the last one."""
        return self.begin + (self.count - 1) * self.step

    @property
    def at(self) -> slice:
        return slice(self.first, self.first + self.count)

    def within(self, low: int, high: int) -> Rows:
        """Those at positions low to high, both included."""
        skipped = max(0, -(-(low - self.begin) // self.step))
        end = min(self.count, (high - self.begin) // self.step + 1)
        begin = self.begin + skipped * self.step
        return replace(self, first=self.first + skipped, count=max(0, end - skipped), begin=begin)

    def strided(self, step: int) -> Iterator[tuple[slice, Rows]]:
        """The same rows in runs of that step, and which of the tensor's rows they are.

        A run's `first` counts the rows that the slice leaves.
        """
        for n in range(min(step, self.count)):
            count = -(-(self.count - n) // step)
            run = Rows(0, count, self.document, self.begin + n, step)
            yield slice(self.first + n, self.first + self.count, step), run


@dataclass(frozen=True)
class Band:
    """A query at position p sees keys p + shift - left to p + shift + right; shift is its document's."""

    left: int = INFINITE
    right: int = INFINITE
    shifts: tuple[int, ...] = (0,)

    def keys_of(self, q: Rows, k: Rows) -> Rows:
        """The keys that any of the queries sees."""
        if q.document != k.document or q.count == 0:
            return replace(k, count=0)
        shift = self.shifts[q.document]
        return k.within(q.begin + shift - self.left, q.last + shift + self.right)

    def queries_of(self, q: Rows, k: Rows) -> Rows:
        """The queries that see any of the keys."""
        if q.document != k.document or k.count == 0:
            return replace(q, count=0)
        shift = self.shifts[q.document]
        return q.within(k.begin - shift - self.right, k.last - shift + self.left)


@dataclass(frozen=True)
class Pair:
    """Rows that meet: where they are in their tensors, and where in the whole. Both have one step."""

    q_rows: slice
    k_rows: slice
    q: Rows
    k: Rows
    hidden: bool = False  # whether a block mask hides something

    @property
    def step(self) -> int:
        return self.q.step if self.q.count > 1 else self.k.step

    def cut(self, queries: tuple[int, int], keys: tuple[int, int]) -> Pair:
        """Those at positions from the first number to the second, both included."""
        q_rows, q = _cut(self.q_rows, self.q, *queries)
        k_rows, k = _cut(self.k_rows, self.k, *keys)
        return replace(self, q_rows=q_rows, k_rows=k_rows, q=q, k=k)

    def inside(self, band: Band) -> Pair:
        """Without what the band hides at the ends."""
        k = band.keys_of(self.q, self.k)
        q = band.queries_of(self.q, k)
        return self.cut((q.begin, q.last), (k.begin, k.last))


def _cut(at: slice, rows: Rows, low: int, high: int) -> tuple[slice, Rows]:
    kept, step = rows.within(low, high), at.step or 1
    first = at.start + (kept.begin - rows.begin) // rows.step * step
    return slice(first, first + max(0, (kept.count - 1) * step + 1), at.step), kept


# A piece under a block mask has at most so many rows of its masks, but at least one row of blocks. So its
# mask takes little memory, and a piece is large enough to occupy a GPU. Not tuned.
ROWS_TOGETHER = 2048
MOST_RUNS = 8  # of blocks in a row of pieces; where there are more, hidden ones are computed, too


@dataclass(frozen=True, eq=False)
class Grid:
    """Which blocks of a block mask hide everything or nothing. Grids are equal only to themselves."""

    block_q: int
    block_k: int
    masks: int  # of different entries and heads
    some: Tensor  # bool [query blocks, key blocks]: some entry and head sees something
    full: Tensor  # every entry and head sees everything

    def parts(self, pair: Pair, band: Band) -> Iterator[Pair]:
        """Smaller pairs with everything that is seen of a pair, and little else."""
        rows, columns = blocks_of(pair.q, self.block_q), blocks_of(pair.k, self.block_k)
        together = max(1, ROWS_TOGETHER // (self.block_q * max(1, self.masks)))
        for first in range(rows.start, rows.stop, together):
            end = min(first + together, rows.stop)
            some = self.some[first:end, columns].any(0).tolist()
            full = self.full[first:end, columns].all(0).tolist()
            for begin, stop, hidden in _runs(some, full):
                keys = (columns.start + begin) * self.block_k, (columns.start + stop) * self.block_k - 1
                part = pair.cut((first * self.block_q, end * self.block_q - 1), keys)
                if part.q.count and part.k.count:
                    part = part.inside(band)
                if part.q.count and part.k.count:
                    yield replace(part, hidden=hidden)


def blocks_of(rows: Rows, size: int) -> slice:
    """The blocks that the rows lie in."""
    return slice(rows.begin // size, rows.last // size + 1)


def _runs(some: Sequence[bool], full: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Begin and end of runs of blocks in which something is seen, and whether something is hidden."""
    states = list(zip(some, full, strict=True))
    changes = [n for n in range(1, len(states)) if states[n] != states[n - 1]]
    found = [
        (begin, end, not states[begin][1])
        for begin, end in pairwise([0, *changes, len(states)])
        if states[begin][0]
    ]
    return found if len(found) <= MOST_RUNS else [(found[0][0], found[-1][1], True)]


def meetings(
    queries: Sequence[Rows], keys: Sequence[Rows], band: Band, grid: Grid | None = None
) -> list[Pair]:
    """All pairs in which something is seen."""
    pairs = [pair for q in queries for k in keys for pair in _meetings(q, k, band)]
    return pairs if grid is None else [part for pair in pairs for part in grid.parts(pair, band)]


def _meetings(q: Rows, k: Rows, band: Band) -> Iterator[Pair]:
    k = band.keys_of(q, k)
    q = band.queries_of(q, k)
    if q.count == 0 or k.count == 0:
        return
    if q.step == k.step or q.count == 1 or k.count == 1:
        yield Pair(q.at, k.at, q, k)
    elif k.step == 1:
        for rows, run in k.strided(q.step):
            yield Pair(q.at, rows, q, run)
    elif q.step == 1:
        for rows, run in q.strided(k.step):
            yield Pair(rows, k.at, run, k)
    else:
        reject("layout", "queries and keys in equal steps, or one of them in steps of 1", (q.step, k.step))


def rows_of(spans: Iterable[Span], starts: Sequence[int]) -> list[Rows]:
    """A rank's rows by documents, which begin at `starts`; the last of these is the end."""
    rows: list[Rows] = []
    first = 0
    for span in spans:
        document = max(0, bisect_right(starts, span.begin) - 1)
        while document + 1 < len(starts) and starts[document] < span.end:
            start, end = starts[document], starts[document + 1]
            begin = span.begin + max(0, -(-(start - span.begin) // span.step)) * span.step
            count = len(range(begin, min(end, span.end), span.step))
            if count:
                rows.append(Rows(first, count, document, begin - start, span.step))
                first += count
            document += 1
    return rows


def in_order(ranks: Sequence[Sequence[Rows]]) -> tuple[Tensor | None, list[Rows]]:
    """Rows of several ranks, one rank after another, and then in the order of the whole.

    Gives the number that each row had before, and the rows as they are then. Where that would be in more
    runs, as in stripes, they stay as they are, and the numbers are None.
    """
    together: list[Rows] = []
    before = 0
    for rank in ranks:
        together += (replace(rows, first=before + rows.first) for rows in rank)
        before += sum(rows.count for rows in rank)
    if not together:
        return None, []
    counts = torch.tensor([rows.count for rows in together])
    document = torch.tensor([rows.document for rows in together]).repeat_interleave(counts)
    position = torch.cat([torch.arange(rows.begin, rows.last + 1, rows.step) for rows in together])
    number = torch.cat([torch.arange(rows.first, rows.first + rows.count) for rows in together])
    order = torch.argsort(document * (1 << 32) + position)
    document, position, number = document[order], position[order], number[order]
    new_run = (position.diff() != 1) | (document.diff() != 0)
    firsts = [0, *(torch.nonzero(new_run).flatten() + 1).tolist(), len(position)]
    if len(firsts) - 1 > len(together):
        return None, together
    runs = [
        Rows(first, end - first, int(document[first]), int(position[first]), 1)
        for first, end in pairwise(firsts)
    ]
    return None if torch.equal(number, torch.arange(len(number))) else number, runs


@dataclass(frozen=True)
class Parcel:
    """Rows of keys that one rank has and another wants."""

    rows: tuple[Rows, ...]  # as the owner has them

    @property
    def count(self) -> int:
        return sum(rows.count for rows in self.rows)

    @property
    def unpacked(self) -> list[Rows]:
        """The rows as they lie in the parcel."""
        found, first = [], 0
        for rows in self.rows:
            found.append(replace(rows, first=first))
            first += rows.count
        return found


def parcel_of(queries: Sequence[Rows], keys: Sequence[Rows], band: Band, grid: Grid | None = None) -> Parcel:
    """The keys that some of the queries see, and those between them unless the grid hides them."""
    wanted = []
    for k in keys:
        if grid is not None:
            wanted += _joined(k, [pair.k for pair in meetings(queries, [k], band, grid)])
            continue
        seen = [rows for q in queries if (rows := band.keys_of(q, k)).count]
        if seen:
            wanted.append(k.within(min(rows.begin for rows in seen), max(rows.last for rows in seen)))
    return Parcel(tuple(wanted))


def _joined(k: Rows, parts: Iterable[Rows]) -> list[Rows]:
    """The rows of k that lie in any of the parts, in runs as long as possible."""
    spans: list[list[int]] = []
    for begin, last in sorted((part.begin, part.last) for part in parts):
        if spans and begin <= spans[-1][1] + k.step:
            spans[-1][1] = max(spans[-1][1], last)
        else:
            spans.append([begin, last])
    return [k.within(*span) for span in spans]


@dataclass(frozen=True)
class Plan:
    """For a rank: what it computes with its own keys and with those of others, and what it sends."""

    rank: int
    size: int
    own: tuple[Pair, ...]
    sent: tuple[Parcel, ...]  # to each rank
    received: tuple[Parcel, ...]  # from each rank
    pairs: tuple[tuple[Pair, ...], ...]  # with the parcel of each rank

    @staticmethod
    def of(
        rank: int,
        queries: Sequence[Sequence[Rows]],
        keys: Sequence[Sequence[Rows]],
        band: Band,
        grid: Grid | None = None,
    ) -> Plan:
        """Of all ranks' queries and keys."""
        size = len(queries)
        others = [other for other in range(size) if other != rank]
        nothing = Parcel(())
        sent, received = [nothing] * size, [nothing] * size
        for other in others:
            sent[other] = parcel_of(queries[other], keys[rank], band, grid)
            received[other] = parcel_of(queries[rank], keys[other], band, grid)
        pairs = [tuple(meetings(queries[rank], parcel.unpacked, band, grid)) for parcel in received]
        own = tuple(meetings(queries[rank], keys[rank], band, grid))
        return Plan(rank, size, own, tuple(sent), tuple(received), tuple(pairs))


def rows_of_ranks(layout: Layout, starts: Sequence[int]) -> list[list[Rows]]:
    return [rows_of(spans, starts) for spans in layout.ranks]
