"""A block mask of the whole sequence, and the part of it that belongs to a piece."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tilewise.block_mask import BlockMask
from tilewise.distributed.plan import Grid, Rows, blocks_of

_NOTHING, _EVERYTHING, _FIRST_TILE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Blocks:
    """What is seen of each block."""

    codes: Tensor  # int32 [B|1, Hq|1, query blocks, key blocks]: one of `tiles`
    tiles: Tensor  # bool [2 or more, block_q, block_k]: nothing, everything, those of the mask
    grids: dict[tuple[int, int], Grid] = field(default_factory=dict)

    @staticmethod
    def of(mask: BlockMask, length_q: int, length_k: int) -> Blocks:
        """Of a mask whose lists were checked. It is remembered as long as the mask exists."""
        known = _known.setdefault(mask, {})
        if (length_q, length_k) not in known:
            known[length_q, length_k] = _made(mask, length_q, length_k)
        return known[length_q, length_k]

    @cached_property
    def digest(self) -> str:
        """Equal where the masks are."""
        text = hashlib.blake2b(digest_size=16)
        for x in (self.codes, self.tiles):
            text.update(repr(tuple(x.shape)).encode())
            text.update(x.cpu().contiguous().numpy().data)
        return text.hexdigest()

    def grid(self, heads: slice) -> Grid:
        """On the host, for these heads of the whole together; always the same object for the same heads."""
        first, end = (0, 1) if self.codes.shape[1] == 1 else (heads.start, heads.stop)
        if (first, end) not in self.grids:
            codes = self.codes[:, first:end].flatten(0, 1)
            some, full = (codes != _NOTHING).any(0).cpu(), (codes == _EVERYTHING).all(0).cpu()
            _, block_q, block_k = self.tiles.shape
            self.grids[first, end] = Grid(block_q, block_k, codes.shape[0], some, full)
        return self.grids[first, end]

    def of_piece(self, q: Rows, k: Rows, heads: slice) -> Tensor:
        """What is seen of a piece, bool [B|1, Hq|1, queries, keys]. `heads` counts those of the whole."""
        codes = self.codes if self.codes.shape[1] == 1 else self.codes[:, heads]
        _, block_q, block_k = self.tiles.shape
        blocks_q, blocks_k = blocks_of(q, block_q), blocks_of(k, block_k)
        seen = self.tiles[codes[:, :, blocks_q, blocks_k].long()]
        seen = seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return seen[:, :, _within(q, blocks_q.start * block_q), _within(k, blocks_k.start * block_k)]


_known: weakref.WeakKeyDictionary[BlockMask, dict[tuple[int, int], Blocks]] = weakref.WeakKeyDictionary()


def _within(rows: Rows, first: int) -> slice:
    return slice(rows.begin - first, rows.last - first + 1, rows.step)


def _made(mask: BlockMask, length_q: int, length_k: int) -> Blocks:
    device = mask.counts.device
    block_q, block_k = min(mask.block_q, max(length_q, 1)), min(mask.block_k, max(length_k, 1))
    lists = [
        (mask.counts, mask.indices, _EVERYTHING if mask.tile_ids is None else mask.tile_ids + _FIRST_TILE)
    ]
    if mask.full_counts is not None and mask.full_indices is not None:
        lists.append((mask.full_counts, mask.full_indices, _EVERYTHING))
    shapes = (x.shape[:2] for counts, indices, _ in lists for x in (counts, indices))
    outer = torch.broadcast_shapes(*shapes)
    rows, columns = -(-length_q // block_q), -(-length_k // block_k)
    codes = torch.zeros((*outer, rows, columns), dtype=torch.int32, device=device)
    for counts, indices, code in lists:
        slots = indices.shape[-1]
        used = torch.arange(slots, device=device) < counts.expand(*outer, rows)[..., None]
        b, h, row, slot = used.nonzero(as_tuple=True)
        column = indices.expand(*outer, rows, slots)[b, h, row, slot].long()
        if isinstance(code, Tensor):
            code = code.expand(*outer, rows, slots)[b, h, row, slot]
        codes[b, h, row, column] = code
    tiles = torch.zeros((_FIRST_TILE, block_q, block_k), dtype=torch.bool, device=device)
    tiles[_EVERYTHING] = True
    if mask.tiles is not None:
        tiles = torch.cat([tiles, mask.tiles[:, :block_q, :block_k]])
    return Blocks(codes, tiles)
