"""vmap: the new dimension is folded into the batch where that is the same thing, else walked along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise._binding import BACKWARD_OWN, DEFAULTS, INDEX

Forward = Callable[[tuple[Any, ...]], tuple[Tensor, Tensor]]
Backward = Callable[[tuple[Any, ...]], Sequence[Tensor]]


def slices(arguments: Sequence[Any], dims: Sequence[int | None], size: int) -> list[tuple[Any, ...]]:
    """The arguments of each of `size` calls."""

    def at(value: Any, dim: int | None, index: int) -> Any:
        return value if dim is None else value.select(dim, index)

    return [tuple(at(v, d, n) for v, d in zip(arguments, dims, strict=True)) for n in range(size)]


def _fold(tensor: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """[B, ...] with `size` along `dim` as [size·B, ...]; an extent of 1 in B is expanded."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    return tensor.expand(size, batch, *tensor.shape[2:]).flatten(0, 1)


def _fold_mask(mask: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    if mask is None:
        return None
    if dim is None and (mask.dim() < 4 or mask.shape[0] == 1):
        return mask  # broadcasts over the batch, however large
    if dim is not None:
        mask, dim = mask.movedim(dim, 0), 0
    rank = 4 if dim is None else 5
    while mask.dim() < rank:
        mask = mask.unsqueeze(rank - 4)
    return _fold(mask, dim, size, batch)


# What folding knows how to treat; a vmap over anything else, or one where the batch matters, is walked along.
_FOLDABLE = {INDEX[name] for name in ("query", "key", "value", "attn_mask")}
_BATCH_MATTERS = [
    INDEX[name]
    for name in ("dropout_seed", "alibi_slopes", "key_lengths", "page_table", "cumulative_q", "block_counts")
]


def _folds(arguments: Sequence[Any], dims: Sequence[int | None]) -> bool:
    batched = {index for index, dim in enumerate(dims) if dim is not None}
    return batched <= _FOLDABLE and all(arguments[index] is None for index in _BATCH_MATTERS)


def _fold_arguments(arguments: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    query, dim = arguments[0], dims[0]
    batch = query.shape[0] if dim is None else query.movedim(dim, 0).shape[1]
    rows = [_fold(x, d, size, batch) for x, d in zip(arguments[:3], dims[:3], strict=True)]
    return [*rows, _fold_mask(arguments[3], dims[3], size, batch), *arguments[4:]]


def complete_dims(dims: Sequence[Any]) -> tuple[Any, ...]:
    return (*dims, *(None for _ in DEFAULTS[len(dims) :]))


def vmap_forward(
    call: Forward, size: int, dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    if _folds(arguments, dims):
        out, lse = call(tuple(_fold_arguments(arguments, dims, size)))
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)
    results = [call(slice) for slice in slices(arguments, dims, size)]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)


def vmap_backward(
    call: Backward, size: int, dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    own, own_dims = arguments[:BACKWARD_OWN], (*dims[: BACKWARD_OWN - 1], None)
    rest, rest_dims = arguments[BACKWARD_OWN:], dims[BACKWARD_OWN:]
    sums_over_batch = any(own[-1][3:])  # the gradients of mask, sinks and logit_scale
    if _folds(rest, rest_dims) and not sums_over_batch:
        rest = _fold_arguments(rest, rest_dims, size)
        batch = rest[0].shape[0] // size
        own = (*(_fold(x, d, size, batch) for x, d in zip(own[:-1], own_dims[:-1], strict=True)), own[-1])
        gradients = [x.unflatten(0, (size, -1)) for x in call((*own, *rest))]
    else:
        each = slices((*own, *rest), (*own_dims, *rest_dims), size)
        parts = zip(*(call(slice) for slice in each), strict=True)
        gradients = [torch.stack(part) for part in parts]
    return gradients, [0] * len(gradients)
