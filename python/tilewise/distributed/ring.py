"""Keys and values go round: in step n every rank has those of the rank n places before it.

Each rank sends its own keys to those that want them, so that a step depends on no other, and no more than the
rows that are seen travel. A step's messages are under way while the step before is computed.

What a step has in memory is what a long sequence needs most of, so messages are made in place, and nothing of
a step outlives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.distributed.messages import Mailbox, Pending
from tilewise.distributed.pieces import Inputs, Joined, Problem, Shares, Sums
from tilewise.distributed.plan import Parcel, Plan


def pack(parcel: Parcel, *tensors: Tensor) -> Tensor:
    """The parcel's rows of one tensor after another, flat."""
    flat = tensors[0].new_empty(numbers(parcel, *tensors))
    for x, part in zip(tensors, unpack(parcel, flat, *tensors), strict=True):
        torch.cat([x[:, :, rows.at] for rows in parcel.rows], 2, out=part)
    return flat


def unpack(parcel: Parcel, flat: Tensor, *like: Tensor) -> list[Tensor]:
    """Views of the parcel's rows, shaped as `like` but for the number of rows."""
    parts = flat.split([numbers(parcel, x) for x in like])
    return [part.view(*x.shape[:2], parcel.count, x.shape[3]) for x, part in zip(like, parts, strict=True)]


def numbers(parcel: Parcel, *like: Tensor) -> int:
    return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in like) * parcel.count


def add_parcel(parcel: Parcel, flat: Tensor, *sums: Tensor) -> None:
    """Adds rows that came back to those they were taken from."""
    for x, part in zip(sums, unpack(parcel, flat, *sums), strict=True):
        for rows, unpacked in zip(parcel.rows, parcel.unpacked, strict=True):
            x[:, :, rows.at] += part[:, :, unpacked.at]


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

    def _differentiate(
        self,
        problem: Problem,
        inputs: Inputs,
        like: tuple[Tensor, Tensor],
        shares: Shares,
        of: int,
        flat: Tensor,
    ) -> Tensor:
        """Gradients of another's keys, flat as the keys are."""
        parcel, gradients = self.plan.received[of], torch.zeros_like(flat, dtype=inputs.wide)
        keys, values = unpack(parcel, flat, *like)
        dk, dv = unpack(parcel, gradients, *like)
        shares.differentiate(problem, inputs, keys, values, self.plan.pairs[of], dk, dv)
        return gradients

    def _gradients(
        self, distance: int, found: dict[int, Tensor], like: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> Pending:
        """Gradients of another's keys back to it, and those of own keys."""
        of = (self.box.rank + distance) % self.box.size
        received = {of: numbers(self.plan.sent[of], *like)}
        return self.box.post(found, received, dtype, like[0].device)

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
                del keys, values, flat  # before the next ones arrive
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
        """dq, dk and dv of the local rows, in f32 or wider.

        Gradients of others' keys go back a step behind the keys.
        """
        size = self.box.size
        shares = Shares.of(inputs, saved, grads, sums)
        dk, dv = (torch.zeros_like(x, dtype=inputs.wide) for x in (k, v))
        coming = self._keys(1, k, v) if size > 1 else None
        shares.differentiate(problem, inputs, k, v, self.plan.own, dk, dv)
        behind: Pending | None = None
        for distance in range(1, size):
            assert coming is not None
            here = coming.wait()
            coming = self._keys(distance + 1, k, v) if distance + 1 < size else None
            found = {
                of: self._differentiate(problem, inputs, (k, v), shares, of, here.pop(of)) for of in [*here]
            }
            self._add(behind, dk, dv)
            behind = self._gradients(distance, found, (k, v), inputs.wide)
        self._add(behind, dk, dv)
        shares.add_sinks(problem, inputs)
        return shares.dq, dk, dv
