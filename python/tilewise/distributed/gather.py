"""All keys that a rank's queries see, brought there at once: fewer messages, more memory than a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.distributed.messages import Mailbox
from tilewise.distributed.pieces import Inputs, Joined, Problem, Shares, Sums, attend_whole, whole_pairs
from tilewise.distributed.plan import Band, Grid, Plan, Rows, in_order, meetings
from tilewise.distributed.ring import add_parcel, numbers, pack, unpack


class Gather:
    def __init__(
        self,
        plan: Plan,
        box: Mailbox,
        queries: Sequence[Rows],
        keys: Sequence[Rows],
        band: Band,
        grid: Grid | None = None,
    ) -> None:
        self.plan, self.box = plan, box
        of_ranks = [parcel.unpacked for parcel in plan.received]
        of_ranks[box.rank] = list(keys)
        self.order, rows = in_order(of_ranks)
        self.counts = [sum(x.count for x in rank) for rank in of_ranks]
        self.pairs = meetings(queries, rows, band, grid)
        self.whole = whole_pairs(queries, self.pairs) if grid is None else None

    def collect(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in the order of the whole."""
        sent = {to: pack(parcel, k, v) for to, parcel in enumerate(self.plan.sent) if parcel.rows}
        received = {of: numbers(parcel, k, v) for of, parcel in enumerate(self.plan.received)}
        here = self.box.post(sent, received, k.dtype, k.device).wait()
        parts = {of: unpack(self.plan.received[of], flat, k, v) for of, flat in here.items()}
        parts[self.box.rank] = [k, v]
        found = (torch.cat([parts[of][n] for of in sorted(parts)], 2) for n in (0, 1))
        if self.order is not None:
            order = self.order.to(k.device)
            found = (x.index_select(2, order) for x in found)
        keys, values = found
        return keys, values

    def give_back(self, dk: Tensor, dv: Tensor, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of collected keys to their owners, and the sums of those of own keys."""
        if self.order is not None:
            order = self.order.to(dk.device)
            dk, dv = (torch.empty_like(x).index_copy_(2, order, x) for x in (dk, dv))
        parts = list(zip(dk.split(self.counts, 2), dv.split(self.counts, 2), strict=True))
        own = self.box.rank
        sent = {
            to: torch.cat([x.flatten() for x in part])
            for to, part in enumerate(parts)
            if to != own and self.counts[to]
        }
        received = {of: numbers(parcel, *like) for of, parcel in enumerate(self.plan.sent)}
        sums = (parts[own][0].contiguous(), parts[own][1].contiguous())
        for of, flat in sorted(self.box.post(sent, received, dk.dtype, dk.device).wait().items()):
            add_parcel(self.plan.sent[of], flat, *sums)
        return sums

    def forward(self, problem: Problem, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.collect(k, v)
        if self.whole is not None:
            return attend_whole(problem, inputs, keys, values, self.whole)
        joined = Joined(inputs, v.shape[-1])
        joined.attend(problem, inputs, keys, values, self.pairs)
        joined.add_sinks(problem, inputs)
        return joined.o, joined.lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        k: Tensor,
        v: Tensor,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
        sums: Sums,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.collect(k, v)
        shares = Shares.of(inputs, saved, grads, sums, whole=self.whole is not None)
        dk, dv = (torch.zeros_like(x, dtype=inputs.wide) for x in (keys, values))
        pairs = self.pairs if self.whole is None else self.whole
        shares.differentiate(problem, inputs, keys, values, pairs, dk, dv)
        shares.add_sinks(problem, inputs)
        del keys, values
        return shares.dq, *self.give_back(dk, dv, (k, v))
