"""What a block mask looks like, in characters, and how much of it is hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.block_mask import BlockMask

CELLS = 24  # to a side of the picture, at most


def described(mask: BlockMask) -> str:
    """Sizes, how much is hidden, and a picture of the first mask: # is seen, + in part, . hidden."""
    batch, heads, rows = mask.counts.shape
    known = mask.length_q is not None and mask.length_k is not None
    size = f"{mask.length_q} x {mask.length_k}" if known else f"{rows} rows"
    text = f"BlockMask of {size}, blocks of {mask.block_q} x {mask.block_k}"
    if batch * heads != 1:
        text += f", one for each of {batch} entries and {heads} heads"
    if mask.counts.device.type == "meta" or 0 in (batch, heads, rows):
        return text
    if known:
        text += f", {100 * mask.sparsity:.1f} % hidden"
    return "\n".join([text, *picture(mask)])


def picture(mask: BlockMask) -> list[str]:
    """The first mask's blocks. A character stands for several where there are many."""
    lists = _lists(mask)
    rows = mask.counts.shape[-1]
    columns = max([int(blocks.max()) + 1 for _, blocks, _ in lists if len(blocks)], default=1)
    if mask.length_k is not None:
        columns = max(columns, -(-mask.length_k // mask.block_k))
    down, across = min(rows, CELLS), min(columns, CELLS)

    def cells(row: Tensor, column: Tensor) -> Tensor:
        index = row * down // rows * across + column * across // columns
        return torch.bincount(index, minlength=down * across).view(down, across)

    kept = torch.zeros(down, across, dtype=torch.int64)
    full = torch.zeros_like(kept)
    for row, column, whole in lists:
        kept += cells(row, column)
        full += cells(row, column) if whole else 0
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
    every = cells(grid[0], grid[1])
    signs = [["." if not k else "#" if f == e else "+" for k, f, e in zip(*line, strict=True)]
             for line in zip(kept.tolist(), full.tolist(), every.tolist(), strict=True)]  # fmt: skip
    return [" ".join(line) for line in signs]


def _lists(mask: BlockMask) -> list[tuple[Tensor, Tensor, bool]]:
    """Of the first mask: rows and columns of the blocks of each list, and whether they are full."""
    lists = [(mask.counts, mask.indices, mask.tiles is None)]
    if mask.full_counts is not None and mask.full_indices is not None:
        lists.append((mask.full_counts, mask.full_indices, True))
    found = []
    for counts, indices, whole in lists:
        counts, indices = counts[0, 0].cpu(), indices[0, 0].cpu().long()
        used = torch.arange(indices.shape[-1]) < counts[:, None]
        found.append((used.nonzero()[:, 0], indices[used], whole))
    return found


def shown_part(mask: BlockMask, length_q: int, length_k: int) -> float:
    """Which part of the pairs of query and key the mask shows."""
    if not length_q or not length_k or not mask.counts.numel():
        return 1.0
    heights, widths = _extents(length_q, mask.block_q), _extents(length_k, mask.block_k)
    pairs = _pairs(mask.counts, mask.indices, heights, widths, mask.tile_ids, mask.tiles)
    if mask.full_counts is not None and mask.full_indices is not None:
        pairs += _pairs(mask.full_counts, mask.full_indices, heights, widths, None, None)
    return pairs / (length_q * length_k)


def _extents(length: int, block: int) -> Tensor:
    """How long each block is; the last may be shorter."""
    return torch.tensor([min(block, length - first) for first in range(0, length, block)])


def _pairs(
    counts: Tensor,
    indices: Tensor,
    heights: Tensor,
    widths: Tensor,
    tile_ids: Tensor | None,
    tiles: Tensor | None,
) -> float:
    """The pairs a list shows, in the mean over its masks."""
    used = torch.arange(indices.shape[-1]) < counts.cpu()[..., None]
    rows, columns = used.nonzero()[:, 2], indices.cpu()[used].long()
    pairs = heights[rows] * widths[columns]
    if tiles is not None and tile_ids is not None:
        ids = tile_ids.cpu()[used].long()
        for height in heights.unique().tolist():  # two at most, and as many widths
            for width in widths.unique().tolist():
                cut = (heights[rows] == height) & (widths[columns] == width)
                pairs[cut] = tiles[:, :height, :width].sum((1, 2)).cpu()[ids[cut]]
    return float(pairs.sum()) / (counts.shape[0] * counts.shape[1])
