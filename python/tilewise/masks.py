"""Masks of documents, prefixes, prompts and images, for `attention(..., block_mask=)`.

Each is made from ranges: the dense mask is never there, and only blocks that a range cuts have elements. Make
a mask once and keep it; `BlockMask.to` moves it to a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise import _binding
from tilewise._documents import Documents
from tilewise._errors import DENSE_NAMES, check_dense, reject, told, translated
from tilewise._scalars import at_least, flag_of, whole_of
from tilewise.block_mask import BlockMask, sizes_of

__all__ = ["block_causal", "documents", "neighbourhood", "padding", "prefix", "shared_prompt"]


def documents(
    lengths: Sequence[Any] | Tensor,
    *,
    causal: bool = False,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Documents packed one after another, each of which sees itself alone.

    `attention` computes this mask as packed sequences where it can, without looking at a block: without
    another mask and dropout, and with the rows of one batch entry, or with those of all entries one after
    another in memory ([B, S, H, D] transposed). `explain` says which it is.

    Args:
        lengths: of the documents, in order, or one such list for each batch entry. Those of an entry sum up
            to the length of the sequence.
        causal: whether tokens see no later ones.
        block_size: of the blocks, or (queries, keys).
        device: where the mask will be.

    >>> documents([5, 3, 8], block_size=4)
    BlockMask of 16 x 16, blocks of 4 x 4, 61.7 % hidden
    # + . .
    + + . .
    . . # #
    . . # #
    """
    entries = _entries(lengths)
    causal = flag_of("causal", causal)
    totals = [sum(entry) for entry in entries]
    if len(set(totals)) > 1:
        reject(
            "lengths", f"the same sum in each entry, {totals[0]}", next(t for t in totals if t != totals[0])
        )
    slices = [_made(_binding.document_slices, entry, causal) for entry in entries]
    mask = _block_mask(slices, totals[0], block_size, device)
    object.__setattr__(mask, "_documents", Documents.of(entries, causal, device))
    return mask


def prefix(
    length: int,
    prefix: int | Sequence[int] | Tensor,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """A prefix that all tokens see, its own among them; what comes after it is causal.

    Args:
        length: of the sequence.
        prefix: length of the prefix, or one for each batch entry.
        block_size: of the blocks, or (queries, keys).
        device: where the mask will be.

    >>> prefix(16, 8, block_size=4)
    BlockMask of 16 x 16, blocks of 4 x 4, 35.9 % hidden
    # # . .
    # # . .
    # # + .
    # # # +
    """
    several = isinstance(prefix, Sequence) or (isinstance(prefix, Tensor) and prefix.dim() > 0)
    prefixes = _wholes("prefix", prefix if several else [prefix])
    if not prefixes:
        reject("prefix", "a length, or one for each batch entry", "none")
    length = whole_of("length", length)
    slices = [_made(_binding.prefix_slices, length, own) for own in prefixes]
    return _block_mask(slices, length, block_size, device)


def shared_prompt(
    prompt: int,
    responses: Sequence[int] | Tensor,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """A prompt followed by several responses to it. All are causal; a response sees the prompt and itself.

    So the keys and values of a prompt are made once for all of its responses, in training, too. Positions of
    each response count on from the prompt's end, so give them to rotary embeddings that way.

    Args:
        prompt: length of the prompt.
        responses: their lengths.
        block_size: of the blocks, or (queries, keys).
        device: where the mask will be.

    >>> shared_prompt(8, [4, 4], block_size=4)
    BlockMask of 16 x 16, blocks of 4 x 4, 53.1 % hidden
    + . . .
    # + . .
    # # + .
    # # . +
    """
    lengths = _wholes("responses", responses)
    prompt = whole_of("prompt", prompt)
    slices = [_made(_binding.shared_prompt_slices, prompt, lengths)]
    return _block_mask(slices, prompt + sum(lengths), block_size, device)


def block_causal(
    length: int,
    block: int,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Blocks of tokens that see themselves and all blocks before, as in block diffusion and video models.

    Args:
        length: of the sequence.
        block: tokens of a block; the last one may have fewer.
        block_size: of the mask's own blocks, or (queries, keys).
        device: where the mask will be.

    >>> block_causal(16, 8, block_size=4)
    BlockMask of 16 x 16, blocks of 4 x 4, 25.0 % hidden
    # # . .
    # # . .
    # # # #
    # # # #
    """
    length = whole_of("length", length)
    slices = [_made(_binding.block_causal_slices, length, whole_of("block", block))]
    return _block_mask(slices, length, block_size, device)


def neighbourhood(
    extents: int | Sequence[int],
    kernel: int | Sequence[int],
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Points of a grid that see the box of `kernel` points around them: neighbourhood attention.

    At an edge the box is moved inside, so that every point sees equally many. Of an even kernel more lies
    before the point than after it.

    Args:
        extents: (length,), (height, width), or (frames, height, width). The points are in row-major order.
        kernel: of the box, or one size for all dimensions.
        block_size: of the blocks, or (queries, keys).
        device: where the mask will be.

    >>> neighbourhood((4, 4), 3, block_size=4)
    BlockMask of 16 x 16, blocks of 4 x 4, 43.8 % hidden
    + + + .
    + + + .
    . + + +
    . + + +
    """
    sizes = _wholes("extents", extents if isinstance(extents, Sequence) else [extents])
    box = _wholes("kernel", kernel if isinstance(kernel, Sequence) else [kernel] * len(sizes))
    slices = [_made(_binding.neighbourhood_slices, sizes, box)]
    return _block_mask(slices, math.prod(sizes), block_size, device)


def padding(keys: Tensor, length_q: int) -> BlockMask:
    """Keys that all queries of a batch entry see, or none does, beside an additive `attn_mask`.

    It is a view of `keys`: no memory is taken but for a few numbers for each entry. Without another mask,
    `attn_mask=keys[:, None, None]` says the same.

    Args:
        keys: bool [B, Sk], true where a key is seen.
        length_q: how many queries there are.

    >>> from tilewise import attention
    >>> bias = torch.randn(4, 6, 6, requires_grad=True)
    >>> seen = torch.arange(6) < torch.tensor([[6], [4]])
    >>> q, k, v = torch.randn(3, 2, 4, 6, 8)
    >>> out = attention(q, k, v, attn_mask=bias, block_mask=padding(seen, 6))
    >>> hidden = torch.where(seen[:, None, None], bias, -torch.inf)
    >>> torch.allclose(out, attention(q, k, v, attn_mask=hidden), atol=1e-5)
    True
    """
    if not isinstance(keys, Tensor):
        raise TypeError(f"keys: expected Tensor, got {type(keys).__name__}")
    check_dense("keys", keys)
    if keys.dtype != torch.bool or keys.dim() != 2:
        reject("keys", "bool [B, Sk]", f"{keys.dtype} {list(keys.shape)}")
    at_least(0, length_q=length_q)
    entries, length_k = keys.shape
    rows, columns = min(length_q, 1), min(length_k, 1)  # blocks
    tiles = keys[:, None].expand(entries, max(length_q, 1), length_k)
    return BlockMask(
        counts=torch.full((entries, 1, rows), columns, dtype=torch.int32, device=keys.device),
        indices=torch.zeros((entries, 1, rows, 1), dtype=torch.int32, device=keys.device),
        tile_ids=torch.arange(entries, dtype=torch.int32, device=keys.device)[:, None, None, None].expand(
            entries, 1, rows, 1
        ),
        tiles=tiles if length_k else tiles.new_zeros((max(entries, 1), max(length_q, 1), 1)),
        block_q=max(length_q, 1),
        block_k=max(length_k, 1),
        length_q=length_q,
        length_k=length_k,
    )


def _made(operator: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return operator(*arguments)
    except RuntimeError as error:
        raise translated(error, {}, DENSE_NAMES) from None


def _block_mask(
    slices: Sequence[Tensor], length: int, block_size: int | tuple[int, int], device: torch.device | str
) -> BlockMask:
    """The mask of slices of one sequence, or of those of each batch entry."""
    block_q, block_k = sizes_of(block_size)
    for entry, own in enumerate(slices):
        own[:, -1] = entry
    together = torch.cat(list(slices)) if len(slices) != 1 else slices[0]
    lists = _made(_binding.block_lists, together, len(slices), length, length, block_q, block_k)
    counts, indices, full_counts, full_indices, tile_ids, tiles = (x.to(device) for x in lists)
    return BlockMask(
        *(counts, indices, full_counts, full_indices, tile_ids, tiles),
        *(tiles.shape[1], tiles.shape[2], length, length),
    )


def _entries(lengths: Any) -> list[list[int]]:
    """The documents of each batch entry."""
    items = _items("lengths", lengths)
    nested = len(items) > 0 and all(isinstance(x, (Sequence, Tensor)) for x in items)
    return [_wholes("lengths", x) for x in items] if nested else [_wholes("lengths", items)]


def _wholes(name: str, given: Any) -> list[int]:
    return [whole_of(name, x) for x in _items(name, given)]


def _items(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, Tensor):
        check_dense(name, given)
        if given.is_meta or given.is_floating_point() or given.is_complex() or given.dim() == 0:
            reject(name, "whole numbers", f"{given.dtype} {list(given.shape)} on {given.device}")
        return list(given.tolist())
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise TypeError(f"{name}: expected a sequence of whole numbers, got {told(given)}")
    return given
