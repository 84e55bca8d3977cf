"""Block-sparse masks: FlexAttention's lists of key blocks, with what is hidden inside the partial ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise._errors import reject

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of the score matrix are computed, for `attention(..., block_mask=)`.

    For each row of query blocks, `indices` lists the key blocks to be computed (its first `counts` entries)
    and `full_indices` those in which nothing is hidden; blocks in neither list are hidden. B and Hq may be 1
    and broadcast. `tile_ids` names, for each block of `indices`, the one of `tiles` that says what is visible
    inside; equal tiles are stored once.

    Shapes: counts, full_counts int32 [B, Hq, query blocks]; indices, full_indices, tile_ids int32
    [B, Hq, query blocks, slots]; tiles bool [tiles, block_q, block_k].

    >>> causal = BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 256, 256, block_size=64)
    >>> causal.counts.tolist(), causal.full_counts.tolist(), tuple(causal.tiles.shape)
    ([[[1, 1, 1, 1]]], [[[0, 1, 2, 3]]], (1, 64, 64))
    """

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None = None
    full_indices: Tensor | None = None
    tile_ids: Tensor | None = None
    tiles: Tensor | None = None
    block_q: int = 128
    block_k: int = 128

    @staticmethod
    def from_dense(mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """The block mask of a boolean mask [B|1, Hq|1, Sq, Sk], true where a query attends.

        >>> BlockMask.from_dense(torch.ones(1, 1, 8, 8, dtype=torch.bool), block_size=4).full_counts.tolist()
        [[[2, 2]]]
        """
        block_q, block_k = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        if mask.dtype != torch.bool or mask.dim() != 4:
            reject("mask", "bool [B|1, Hq|1, Sq, Sk]", f"{mask.dtype} {list(mask.shape)}")
        length_q, length_k = mask.shape[2:]
        padding = (0, -length_k % block_k, 0, -length_q % block_q)
        # What lies past the end is nobody's to see; a block that is full up to there still counts as full.
        seen = torch.nn.functional.pad(mask, padding).unflatten(2, (-1, block_q)).unflatten(4, (-1, block_k))
        seen = seen.transpose(3, 4)  # [B, Hq, query blocks, key blocks, block_q, block_k]
        inside = torch.nn.functional.pad(torch.ones_like(mask[:1, :1]), padding)
        inside = inside.unflatten(2, (-1, block_q)).unflatten(4, (-1, block_k)).transpose(3, 4)
        full = (seen | ~inside).flatten(4).all(-1)
        partial = seen.flatten(4).any(-1) & ~full
        counts, indices = _listed(partial)
        full_counts, full_indices = _listed(full)
        tiles, ids = _distinct(seen[partial])
        tile_ids = torch.zeros_like(indices)
        tile_ids[_used(counts, indices)] = ids
        return BlockMask(counts, indices, full_counts, full_indices, tile_ids, tiles, block_q, block_k)

    @staticmethod
    def from_mask_mod(
        mask_mod: MaskMod,
        length_q: int,
        length_k: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The block mask of FlexAttention's `mask_mod(b, h, q_idx, kv_idx)`.

        >>> window = BlockMask.from_mask_mod(lambda b, h, q, k: (q - k).abs() <= 8, 64, 64, block_size=16)
        >>> window.counts.tolist()
        [[[2, 3, 3, 2]]]
        """
        from torch.nn.attention.flex_attention import create_mask

        mask = create_mask(mask_mod, batch, heads, length_q, length_k, device=str(device))
        return BlockMask.from_dense(mask, block_size)

    @staticmethod
    def from_torch(block_mask: Any) -> BlockMask:
        """The same as torch's own `BlockMask`, whose mask_mod is evaluated once, for the partial blocks.

        `attention` does this by itself and remembers the result. Call it before `torch.compile`: how many
        different tiles there are depends on data.

        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> theirs = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        >>> tuple(BlockMask.from_torch(theirs).tiles.shape)
        (1, 128, 128)
        """
        block_q, block_k = block_mask.BLOCK_SIZE
        length_q, length_k = block_mask.seq_lengths
        counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
        used = _used(counts, indices)
        b, h, row, slot = used.nonzero(as_tuple=True)
        column = indices[b, h, row, slot]
        # A mask_mod may look its indices up in tensors as long as the sequence, so none goes past the end.
        q = (row[:, None] * block_q + torch.arange(block_q, device=row.device)).clamp(max=length_q - 1)
        k = (column[:, None] * block_k + torch.arange(block_k, device=row.device)).clamp(max=length_k - 1)
        tiles, ids = _distinct(_evaluate(block_mask.mask_mod, b, h, q, k))
        tile_ids = torch.zeros_like(indices)
        tile_ids[used] = ids
        return BlockMask(
            counts,
            indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            tile_ids,
            tiles,
            block_q,
            block_k,
        )

    def to_dense(self, length_q: int, length_k: int) -> Tensor:
        """The boolean mask [B|1, Hq|1, length_q, length_k] it stands for.

        >>> mask = torch.rand(1, 2, 50, 70) < 0.3
        >>> torch.equal(BlockMask.from_dense(mask, block_size=16).to_dense(50, 70), mask)
        True
        """
        batch, heads, rows = self.counts.shape
        columns = -(-length_k // self.block_k)
        shape = (batch, heads, rows, columns, self.block_q, self.block_k)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.counts.device)
        used = _used(self.counts, self.indices)
        b, h, row, _ = used.nonzero(as_tuple=True)
        inside = True if self.tiles is None or self.tile_ids is None else self.tiles[self.tile_ids[used]]
        seen[b, h, row, self.indices[used]] = inside
        if self.full_counts is not None and self.full_indices is not None:
            used = _used(self.full_counts, self.full_indices)
            b, h, row, _ = used.nonzero(as_tuple=True)
            seen[b, h, row, self.full_indices[used]] = True
        return seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :length_q, :length_k]


def _evaluate(mask_mod: MaskMod, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """mask_mod, a function of single indices, of b, h [tiles], q [tiles, block_q] and k [tiles, block_k]."""
    tile = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    if b.shape[0] == 0:
        return torch.zeros((0, q.shape[1], k.shape[1]), dtype=torch.bool, device=b.device)
    return torch.vmap(tile, chunk_size=256)(b, h, q, k)


def _used(counts: Tensor, indices: Tensor) -> Tensor:
    """Which slots of `indices` are among the first `counts`."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of what is true along the last dimension, in ascending order."""
    order = torch.sort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _distinct(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Each different tile once, and for every tile which one it is."""
    count = tiles.shape[0]
    if count == 0:
        return tiles.new_ones((1, *tiles.shape[1:])), torch.zeros(0, dtype=torch.int32, device=tiles.device)
    generator = torch.Generator().manual_seed(0)
    size = tiles[0].numel()
    weights = torch.randint(-(2**62), 2**62, (size,), generator=generator).to(tiles.device)
    hashes = torch.cat([(part.flatten(1) * weights).sum(1) for part in tiles.split(64)])
    _, ids = torch.unique(hashes, return_inverse=True)
    first = torch.full((int(ids.max()) + 1,), count, device=tiles.device)
    first.scatter_reduce_(0, ids, torch.arange(count, device=tiles.device), "amin")
    kept = tiles[first]
    if not torch.equal(kept[ids], tiles):  # two different tiles with one hash: keep them all
        return tiles.contiguous(), torch.arange(count, dtype=torch.int32, device=tiles.device)
    return kept, ids.to(torch.int32)


_converted: weakref.WeakKeyDictionary[Any, BlockMask] = weakref.WeakKeyDictionary()


def block_mask_of(given: Any) -> BlockMask:
    """Ours as it is; torch's converted, once for each object."""
    if isinstance(given, BlockMask):
        return given
    if not hasattr(given, "kv_num_blocks") or not hasattr(given, "mask_mod"):
        reject("block_mask", "tilewise.BlockMask or torch's BlockMask", type(given).__name__)
    known = _converted.get(given)
    if known is None:
        known = _converted[given] = BlockMask.from_torch(given)
    return known
