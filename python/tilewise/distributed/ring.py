"""Keys and values go round: in step n every rank has those of the rank n places before it.

Each rank sends its own keys to those that want them, so that a step depends on no other, and no more than the
rows that are seen travel. A step's messages are under way while the step before is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.distributed.messages import Mailbox, Pending
from tilewise.distributed.pieces import Inputs, Joined, Problem, Shares
from tilewise.distributed.plan import Parcel, Plan


def pack(parcel: Parcel, *tensors: Tensor) -> Tensor:
    """The parcel's rows of all tensors, flat."""
    return torch.cat([x[:, :, rows.at].flatten() for x in tensors for rows in parcel.rows])


def unpack(parcel: Parcel, flat: Tensor, *like: Tensor) -> list[Tensor]:
    """Rows of as many tensors, shaped as `like` but for the number of rows."""
    found, at = [], 0
    for x in like:
        batch, heads, _, dim = x.shape
        parts = []
        for rows in parcel.rows:
            size = batch * heads * rows.count * dim
            parts.append(flat[at : at + size].view(batch, heads, rows.count, dim))
            at += size
        found.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
    return found


def numbers(parcel: Parcel, *like: Tensor) -> int:
    return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in like) * parcel.count


class Ring:
    def __init__(self, plan: Plan, box: Mailbox) -> None:
        self.plan, self.box = plan, box

    def _keys(self, distance: int, k: Tensor, v: Tensor) -> Pending:
        """Own keys to the rank that many places on, and those of the rank as many places before."""
        to, of = (self.box.rank + distance) % self.box.size, (self.box.rank - distance) % self.box.size
        sent, received = self.plan.sent[to], self.plan.received[of]
        return self.box.post(
            {to: pack(sent, k, v)} if sent.rows else {}, {of: numbers(received, k, v)}, k.dtype, k.device
        )

    def _gradients(self, distance: int, found: Sequence[Tensor], like: tuple[Tensor, Tensor]) -> Pending:
        """Gradients of another's keys back to it, and those of own keys."""
        of, to = (self.box.rank + distance) % self.box.size, (self.box.rank - distance) % self.box.size
        flat = torch.cat([x.flatten() for x in found])
        return self.box.post({to: flat}, {of: numbers(self.plan.sent[of], *like)}, flat.dtype, flat.device)

    def _add(self, pending: Pending | None, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of own keys that came from another rank."""
        for of, flat in ({} if pending is None else pending.wait()).items():
            add_parcel(self.plan.sent[of], flat, dk, dv)

    def forward(self, problem: Problem, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """o and lse of the local queries, in f32 and f64."""
        joined = Joined(inputs, v.shape[-1])
        coming = self._keys(1, k, v) if self.box.size > 1 else None
        joined.attend(problem, inputs, k, v, self.plan.own)
        for distance in range(1, self.box.size):
            assert coming is not None
            here = coming.wait()
            coming = self._keys(distance + 1, k, v) if distance + 1 < self.box.size else None
            for of, flat in here.items():
                keys, values = unpack(self.plan.received[of], flat, k, v)
                joined.attend(problem, inputs, keys, values, self.plan.pairs[of])
        joined.add_sinks(problem, inputs)
        return joined.o, joined.lse

    def backward(
        self, problem: Problem, inputs: Inputs, k: Tensor, v: Tensor, shares: Shares
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of the local keys, in f32 or wider; the rest is in `shares`.

        Gradients of others' keys go back a step behind the keys.
        """
        size = self.box.size
        dk, dv = (torch.zeros_like(x, dtype=inputs.wide) for x in (k, v))
        coming = self._keys(1, k, v) if size > 1 else None
        shares.differentiate(problem, inputs, k, v, self.plan.own, dk, dv)
        behind: Pending | None = None
        for distance in range(1, size):
            assert coming is not None
            here = coming.wait()
            coming = self._keys(distance + 1, k, v) if distance + 1 < size else None
            found = [k.new_empty(0, dtype=inputs.wide)] * 2
            for of, flat in here.items():
                keys, values = unpack(self.plan.received[of], flat, k, v)
                found = [torch.zeros_like(x, dtype=inputs.wide) for x in (keys, values)]
                pairs = self.plan.pairs[of]
                shares.differentiate(problem, inputs, keys, values, pairs, found[0], found[1])
            self._add(behind, dk, dv)
            behind = self._gradients(distance, found, (k, v))
        self._add(behind, dk, dv)
        return dk, dv


def add_parcel(parcel: Parcel, flat: Tensor, *sums: Tensor) -> None:
    """Adds rows that came back to those they were taken from."""
    at = 0
    for x in sums:
        batch, heads, _, dim = x.shape
        size = batch * heads * parcel.count * dim
        part = flat[at : at + size].view(batch, heads, parcel.count, dim)
        at += size
        for rows, unpacked in zip(parcel.rows, parcel.unpacked, strict=True):
            x[:, :, rows.at] += part[:, :, unpacked.at]
