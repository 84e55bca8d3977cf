"""Block-sparse masks: FlexAttention's lists of key blocks, with what is hidden inside the partial ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise._block_picture import described, shown_part
from tilewise._documents import Documents
from tilewise._errors import reject, told
from tilewise._scalars import at_least, whole_of

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which blocks of the score matrix are computed, for `attention(..., block_mask=)`.

    For each row of query blocks, `indices` lists the key blocks to be computed (its first `counts` entries)
    and `full_indices` those in which nothing is hidden; blocks in neither list are hidden. B and Hq may be 1
    and broadcast. `tile_ids` names, for each block of `indices`, the one of `tiles` that says what is visible
    inside; equal tiles are stored once.

    Shapes: counts, full_counts int32 [B, Hq, query blocks]; indices, full_indices, tile_ids int32
    [B, Hq, query blocks, slots]; tiles bool [tiles, block_q, block_k].

    `length_q` and `length_k` are the queries and keys it was made for, where that is known; attention of
    other lengths is then an error. `tilewise.masks` makes masks of documents, prefixes, images and the like.

    >>> causal = BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 256, 256, block_size=64)
    >>> causal.counts.tolist(), causal.full_counts.tolist(), tuple(causal.tiles.shape)
    ([[[1, 1, 1, 1]]], [[[0, 1, 2, 3]]], (1, 64, 64))
    >>> causal
    BlockMask of 256 x 256, blocks of 64 x 64, 49.8 % hidden
    + . . .
    # + . .
    # # + .
    # # # +
    """

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None = None
    full_indices: Tensor | None = None
    tile_ids: Tensor | None = None
    tiles: Tensor | None = None
    block_q: int = 128
    block_k: int = 128
    length_q: int | None = None
    length_k: int | None = None

    # What `masks.documents` says of its mask. No field: a mask that `dataclasses.replace` makes has none.
    _documents: ClassVar[Documents | None] = None

    @staticmethod
    def from_dense(mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """The block mask of a boolean mask [B|1, Hq|1, Sq, Sk], true where a query attends.

        Blocks larger than the mask are taken to be as large as it.

        >>> BlockMask.from_dense(torch.ones(1, 1, 8, 8, dtype=torch.bool), block_size=4).full_counts.tolist()
        [[[2, 2]]]
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: expected Tensor, got {type(mask).__name__}")
        block_q, block_k = sizes_of(block_size)
        if mask.dtype != torch.bool or mask.dim() != 4:
            reject("mask", "bool [B|1, Hq|1, Sq, Sk]", f"{mask.dtype} {list(mask.shape)}")
        length_q, length_k = mask.shape[2:]
        block_q, block_k = min(block_q, max(length_q, 1)), min(block_k, max(length_k, 1))
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
        return BlockMask(
            *(counts, indices, full_counts, full_indices, tile_ids, tiles),
            *(block_q, block_k, length_q, length_k),
        )

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

        if not callable(mask_mod) or isinstance(mask_mod, type):
            raise TypeError(f"mask_mod: expected a function, got {told(mask_mod)}")
        at_least(0, length_q=length_q, length_k=length_k)
        for name, size in (("batch", batch), ("heads", heads)):
            if size is not None:
                at_least(0, **{name: size})
        mask = create_mask(mask_mod, batch, heads, length_q, length_k, device=str(device))
        return BlockMask.from_dense(mask, block_size)

    @staticmethod
    def from_torch(block_mask: Any, length_q: int | None = None, length_k: int | None = None) -> BlockMask:
        """The same as torch's own `BlockMask`, whose mask_mod is evaluated once, for the partial blocks.

        `attention` does this by itself and remembers the result. Call it before `torch.compile`: how many
        different tiles there are depends on data.

        Args:
            block_mask: torch's.
            length_q: queries of the attention it is for, as many as it was made for by default. Blocks larger
                than that are taken to be as large as it, so that nothing is evaluated that does not exist.
            length_k: likewise keys.

        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> theirs = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        >>> tuple(BlockMask.from_torch(theirs).tiles.shape)
        (1, 128, 128)
        """
        _check_torchs(block_mask)
        rows, columns = _sides(block_mask, length_q, length_k)
        counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
        tile_ids = tiles = None
        if not _hides_nothing(block_mask.mask_mod):
            used = _used(counts, indices)
            b, h, row, slot = used.nonzero(as_tuple=True)
            column = indices[b, h, row, slot]
            mask_mod = block_mask.mask_mod
            tiles, ids = _distinct(_evaluate(mask_mod, b, h, rows.positions(row), columns.positions(column)))
            tile_ids = torch.zeros_like(indices)
            tile_ids[used] = ids
        return BlockMask(
            counts,
            indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            tile_ids,
            tiles,
            rows.block,
            columns.block,
        )

    def to_dense(self, length_q: int | None = None, length_k: int | None = None) -> Tensor:
        """The boolean mask [B|1, Hq|1, length_q, length_k] it stands for.

        The lengths are those it was made for by default.

        >>> mask = torch.rand(1, 2, 50, 70) < 0.3
        >>> torch.equal(BlockMask.from_dense(mask, block_size=16).to_dense(), mask)
        True
        """
        length_q = _length("length_q", length_q, self.length_q)
        length_k = _length("length_k", length_k, self.length_k)
        batch, heads, rows = self.counts.shape
        block_q, block_k = min(self.block_q, max(length_q, 1)), min(self.block_k, max(length_k, 1))
        columns = -(-length_k // block_k)
        shape = (batch, heads, rows, columns, block_q, block_k)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.counts.device)
        used = _used(self.counts, self.indices)
        b, h, row, _ = used.nonzero(as_tuple=True)
        inside: Any = True
        if self.tiles is not None and self.tile_ids is not None:
            inside = self.tiles[self.tile_ids[used], :block_q, :block_k]
        seen[b, h, row, self.indices[used]] = inside
        if self.full_counts is not None and self.full_indices is not None:
            used = _used(self.full_counts, self.full_indices)
            b, h, row, _ = used.nonzero(as_tuple=True)
            seen[b, h, row, self.full_indices[used]] = True
        return seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :length_q, :length_k]

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on a device.

        >>> BlockMask.from_dense(torch.ones(1, 1, 8, 8, dtype=torch.bool)).to("meta").counts.device.type
        'meta'
        """
        fields = ("counts", "indices", "full_counts", "full_indices", "tile_ids", "tiles")
        tensors = {name: getattr(self, name) for name in fields}
        moved = replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})
        if self._documents is not None:
            object.__setattr__(moved, "_documents", self._documents.to(device))
        return moved

    @property
    def sparsity(self) -> float:
        """Which part of all pairs of query and key is hidden, from 0 to 1. On a GPU it waits for the device.

        >>> BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 4, 4).sparsity
        0.375
        """
        length_q = _length("length_q", None, self.length_q)
        length_k = _length("length_k", None, self.length_k)
        return 1 - shown_part(self, length_q, length_k)

    def __repr__(self) -> str:
        return described(self)


def _length(name: str, given: Any, own: int | None) -> int:
    """What is given, or what the mask was made for."""
    length = own if given is None else given
    if length is None:
        reject(name, "a length, since the mask was made without one", None)
    at_least(0, **{name: length})
    return length


_TORCHS_ONE_BLOCK = 1 << 30  # torch's size of a block that holds everything, however long


@dataclass(frozen=True)
class _Side:
    """Queries or keys of one of torch's masks."""

    block: int  # how much of a block there is
    length: int

    @staticmethod
    def of(name: str, block: int, length: int, asked: int | None) -> _Side:
        """Of a mask with blocks and a length of its own, for attention of `asked` rows."""
        if asked is not None and block > asked:
            length = asked if block == _TORCHS_ONE_BLOCK else min(length, asked)
            return _Side(max(asked, 1), length)
        if asked is None and min(block, length) >= _TORCHS_ONE_BLOCK:
            reject(name, "the length of the attention, since the block has none", None)
        return _Side(block if asked is not None else min(block, max(length, 1)), length)

    def positions(self, blocks: Tensor) -> Tensor:
        """[blocks, positions]. A mask_mod may look them up in tensors as long as the sequence, so none goes
        past the end."""
        inside = torch.arange(self.block, device=blocks.device)
        return (blocks[:, None] * self.block + inside).clamp(max=max(self.length - 1, 0))


def _sides(block_mask: Any, length_q: int | None, length_k: int | None) -> tuple[_Side, _Side]:
    (block_q, block_k), (own_q, own_k) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    return _Side.of("length_q", block_q, own_q, length_q), _Side.of("length_k", block_k, own_k, length_k)


def _hides_nothing(mask_mod: MaskMod) -> bool:
    from torch.nn.attention.flex_attention import noop_mask

    return mask_mod is noop_mask


def sizes_of(block_size: Any) -> tuple[int, int]:
    """(block_q, block_k)"""
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        reject("block_size", "a size, or one for queries and one for keys", told(block_size))
    for size in sizes:
        if whole_of("block_size", size) < 1:
            reject("block_size", "at least 1", size)
    return sizes


def _evaluate(mask_mod: MaskMod, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """mask_mod, a function of single indices, of b, h [tiles], q [tiles, block_q] and k [tiles, block_k]."""
    tile = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    if b.shape[0] == 0:
        return torch.zeros((0, q.shape[1], k.shape[1]), dtype=torch.bool, device=b.device)
    with _indexing():
        return torch.vmap(tile, chunk_size=256)(b, h, q, k)


def _indexing() -> AbstractContextManager[Any]:
    """Lets a mask_mod index tensors by its arguments, as torch does. Torch 2.10 needs it."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:  # it is private, and may move
        return nullcontext()
    return TransformGetItemToIndex()


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


_converted: weakref.WeakKeyDictionary[Any, dict[tuple[_Side, _Side], BlockMask]] = weakref.WeakKeyDictionary()


def block_mask_of(given: Any, length_q: int | None = None, length_k: int | None = None) -> BlockMask:
    """Ours as it is; torch's converted, once for each object and what there is of its blocks."""
    if isinstance(given, BlockMask):
        return given
    _check_torchs(given)
    known = _converted.setdefault(given, {})
    sides = _sides(given, length_q, length_k)
    if sides not in known:
        known[sides] = BlockMask.from_torch(given, length_q, length_k)
    return known[sides]


def _check_torchs(given: Any) -> None:
    if not all(hasattr(given, name) for name in ("kv_num_blocks", "mask_mod", "BLOCK_SIZE", "seq_lengths")):
        reject("block_mask", "tilewise.BlockMask or torch's BlockMask", type(given).__name__)
