"""A rank's part of a tensor, and the whole from all parts: of tokens, positions, labels and rows of masks."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise._errors import reject
from tilewise.distributed.layout import Layout
from tilewise.distributed.messages import Mesh, boxes_of


def shard(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """The rank's tokens of a tensor that has all of them along `dim`. Differentiable.

    Of a mask [..., Sq, Sk] it takes dim -2: attention wants a rank's queries, and all keys.

    >>> from tilewise.distributed import zigzag
    >>> shard(torch.arange(8), zigzag(8, 2), rank=1, dim=0)
    tensor([2, 3, 4, 5])
    """
    if whole.shape[dim] != layout.length:
        reject("whole", f"{layout.length} tokens along dimension {dim}", list(whole.shape))
    return whole.index_select(dim, layout.positions(rank).to(whole.device))


def unshard(local: Tensor, layout: Layout, dim: int, mesh: Mesh = None) -> Tensor:
    """The whole tensor, on every rank, in the order of the sequence. No gradient is recorded."""
    boxes = boxes_of(mesh)
    if len(boxes) != 1:
        reject("mesh", "1 dimension", len(boxes))
    box = boxes[0]
    if len(layout.ranks) != box.size:
        reject("layout", f"a layout for the mesh's {box.size} ranks", f"one for {len(layout.ranks)}")
    local = local.detach().movedim(dim, 0).contiguous()
    if local.shape[0] != layout.lengths[box.rank]:
        reject("local", f"{layout.lengths[box.rank]} tokens along dimension {dim}", local.shape[0])
    each = local[:1].numel() if local.shape[0] else local.shape[1:].numel()
    others = [rank for rank in range(box.size) if rank != box.rank]
    here = box.post(
        {rank: local.flatten() for rank in others},
        {rank: layout.lengths[rank] * each for rank in others},
        local.dtype,
        local.device,
    ).wait()
    here[box.rank] = local.flatten()
    flat = torch.cat([here[rank] for rank in sorted(here)])
    rows = flat.view(layout.length, *local.shape[1:])
    whole = torch.empty_like(rows).index_copy_(0, layout.order.to(local.device), rows)
    return whole.movedim(0, dim)
