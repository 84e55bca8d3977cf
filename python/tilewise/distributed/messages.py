"""Messages between the ranks of a group, over torch.distributed's point-to-point calls.

Sizes are known to both sides from the plan, so that none is sent, and an empty message is none at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise._errors import DeviceError, reject

Mesh = DeviceMesh | dist.ProcessGroup | None


class Pending:
    """Messages under way. What is sent is kept until it has left."""

    def __init__(
        self, box: Mailbox, works: Sequence[Any], sent: Sequence[Tensor], received: dict[int, Tensor]
    ) -> None:
        self._box, self._works, self._sent, self._received = box, list(works), list(sent), received

    def wait(self) -> dict[int, Tensor]:
        """What came, by its sender, which is the caller's from then on. On CUDA the current stream waits, not
        the host."""
        for work in self._works:
            with self._box.naming_failures():
                work.wait()
        received, self._works, self._sent, self._received = self._received, [], [], {}
        return received


_connected: WeakSet[dist.ProcessGroup] = WeakSet()  # groups whose ranks have met
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # of each group


class Mailbox:
    """One rank's place in a group, for one call."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Without a group a rank is alone."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._word = ""
        if group is not None and self.rank >= 0:
            _calls[group] = _calls.get(group, 0) + 1
            self._word = f"tilewise/{group.group_name}/{_calls[group]}"

    def connect(self, device: torch.device) -> None:
        """Makes all ranks meet before two of them have messages, without which NCCL would wait for ever."""
        if self.group is None or device.type != "cuda" or self.group in _connected:
            return
        with self.naming_failures():
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        _connected.add(self.group)

    def post(
        self, sent: dict[int, Tensor], received: dict[int, int], dtype: torch.dtype, device: torch.device
    ) -> Pending:
        """Sends flat tensors to ranks, and receives as many numbers as said from others.

        All ranks post in the same order, and a pair of ranks has one message each way in a call.
        """
        sent = {to: x.contiguous() for to, x in sent.items() if x.numel()}
        coming = {
            of: torch.empty(count, dtype=dtype, device=device) for of, count in received.items() if count
        }
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for to, x in sent.items()]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=of) for of, x in coming.items()]
        with self.naming_failures():
            works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(self, works, list(sent.values()), coming)

    def leave_word(self, error: Exception) -> None:
        """For the ranks that wait for this one, and will find it when they do no longer. The first counts."""
        with suppress(Exception):  # the store may be gone
            store = dist.distributed_c10d._get_default_store()
            if self._word and not store.check([self._word]):
                store.set(self._word, f"rank {self.rank} raised {type(error).__name__}: {error}")

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Says of a failed message what another rank raised, or what most likely happened to it."""
        try:
            yield
        except RuntimeError as error:
            cause = "another rank raised, ended or took longer than the process group's time-out"
            with suppress(Exception):
                store = dist.distributed_c10d._get_default_store()
                if self._word and store.check([self._word]):
                    cause = store.get(self._word).decode()
            raise DeviceError(f"a message between ranks failed: {cause} ({error})") from error


def boxes_of(mesh: Mesh) -> tuple[Mailbox, ...]:
    """One for each dimension of a mesh; a process group has one dimension, and None is all ranks."""
    if not dist.is_initialized():
        reject("mesh", "an initialised torch.distributed", "none: call init_process_group first")
    if isinstance(mesh, DeviceMesh):
        left_out = mesh.get_coordinate() is None  # then it has no groups
        groups = [] if left_out else [mesh.get_group(n) for n in range(mesh.ndim)]
    elif mesh is None or isinstance(mesh, dist.ProcessGroup) or mesh == dist.GroupMember.NON_GROUP_MEMBER:
        groups = [cast(dist.ProcessGroup, dist.group.WORLD if mesh is None else mesh)]
    else:
        reject("mesh", "a DeviceMesh, a process group or None", type(mesh).__name__)
    boxes = tuple(Mailbox(group) for group in groups)
    if not boxes or any(box.rank < 0 for box in boxes):
        reject("mesh", "a mesh that includes this rank", "one without it")
    return boxes
