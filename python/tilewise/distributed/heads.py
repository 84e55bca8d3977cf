"""All positions of some heads in place of all heads of some positions, and back (Ulysses)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.distributed.messages import Mailbox
from tilewise.distributed.pieces import Heads


def share_heads(whole: int, group: int, ranks: int) -> list[Heads]:
    """The query heads of each rank: whole groups where there are enough, else as even as it goes.

    There may be fewer than ranks; some then have none.
    """
    unit = group if whole // group >= ranks else 1
    short, longer = divmod(whole // unit, ranks)
    found, first = [], 0
    for rank in range(ranks):
        count = (short + (rank < longer)) * unit
        found.append(Heads(first, count, whole, group))
        first += count
    return found


# A part of the heads has at least so many rows of queries: more tiles of them than a device computes at once.
LEAST_ROWS = {"cpu": 1 << 11, "cuda": 1 << 15}
MOST_PARTS = 8


def parts_of(heads: Heads, rows: int, device: torch.device) -> tuple[Heads, ...]:
    """Parts that a rank computes one after another, so that messages and gradients of one are in memory.

    All ranks of a ring have the same parts; `rows` is how many queries of each head a rank has on average.
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    return tuple(heads.parts(min(MOST_PARTS, heads.count * rows // LEAST_ROWS[kind])))


class HeadExchange:
    """For tensors [B, H, S, ...] whose heads a rank takes by `slices[rank]`.

    Slices of ranks may overlap, as those of key heads that several ranks share do.
    """

    def __init__(
        self, box: Mailbox, lengths: Sequence[int], order: Tensor | None, device: torch.device
    ) -> None:
        self.box, self.lengths = box, list(lengths)
        self.order = None if order is None else order.to(device)

    def spread(self, x: Tensor, slices: Sequence[slice]) -> Tensor:
        """This rank's heads of all ranks' rows, in the order of the whole."""
        own = self.box.rank
        mine = slices[own]
        heads = mine.stop - mine.start
        inner = x.shape[3:]
        each = x.shape[0] * heads * inner.numel()
        sent = {to: x[:, slices[to]].flatten() for to in range(self.box.size) if to != own}
        received = {of: each * self.lengths[of] for of in range(self.box.size) if of != own}
        here = self.box.post(sent, received, x.dtype, x.device).wait()
        parts = []
        for of, length in enumerate(self.lengths):
            shape = (x.shape[0], heads, length, *inner)
            parts.append(
                x[:, mine] if of == own else here[of].view(shape) if of in here else x.new_empty(shape)
            )
        rows = torch.cat(parts, 2)
        return rows if self.order is None else rows.index_select(2, self.order)

    def collect(self, y: Tensor, slices: Sequence[slice], heads: int) -> Tensor:
        """All heads of this rank's rows; of heads that several ranks have, the sums."""
        own = self.box.rank
        if self.order is not None:
            y = torch.empty_like(y).index_copy_(2, self.order, y)
        parts = y.split(self.lengths, 2)
        inner = y.shape[3:]
        each = y.shape[0] * self.lengths[own] * inner.numel()
        sent = {to: part.flatten() for to, part in enumerate(parts) if to != own}
        received = {of: each * (x.stop - x.start) for of, x in enumerate(slices) if of != own}
        here = self.box.post(sent, received, y.dtype, y.device).wait()
        result = y.new_zeros((y.shape[0], heads, self.lengths[own], *inner))
        result[:, slices[own]] += parts[own]
        for of in sorted(here):
            count = slices[of].stop - slices[of].start
            result[:, slices[of]] += here[of].view(y.shape[0], count, self.lengths[own], *inner)
        return result
