"""Which rows of queries meet which rows of keys. Known on the host, from the layout and the band alone."""

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

    @property
    def step(self) -> int:
        return self.q.step if self.q.count > 1 else self.k.step


def meetings(queries: Sequence[Rows], keys: Sequence[Rows], band: Band) -> list[Pair]:
    """All pairs in which something is seen."""
    return [pair for q in queries for k in keys for pair in _meetings(q, k, band)]


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


def parcel_of(queries: Sequence[Rows], keys: Sequence[Rows], band: Band) -> Parcel:
    """The keys that some of the queries see, and those between them."""
    wanted = []
    for k in keys:
        seen = [rows for q in queries if (rows := band.keys_of(q, k)).count]
        if seen:
            wanted.append(k.within(min(rows.begin for rows in seen), max(rows.last for rows in seen)))
    return Parcel(tuple(wanted))


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
    def of(rank: int, queries: Sequence[Sequence[Rows]], keys: Sequence[Sequence[Rows]], band: Band) -> Plan:
        """Of all ranks' queries and keys."""
        size = len(queries)
        others = [other for other in range(size) if other != rank]
        nothing = Parcel(())
        sent, received = [nothing] * size, [nothing] * size
        for other in others:
            sent[other] = parcel_of(queries[other], keys[rank], band)
            received[other] = parcel_of(queries[rank], keys[other], band)
        pairs = [tuple(meetings(queries[rank], parcel.unpacked, band)) for parcel in received]
        own = tuple(meetings(queries[rank], keys[rank], band))
        return Plan(rank, size, own, tuple(sent), tuple(received), tuple(pairs))


def rows_of_ranks(layout: Layout, starts: Sequence[int]) -> list[list[Rows]]:
    return [rows_of(spans, starts) for spans in layout.ranks]
