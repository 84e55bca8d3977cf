"""What `attention` and its like are given, as the operators take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tilewise._errors import check_dense, reject, told
from tilewise._scalars import flag_of, number_of, text_of, whole_of
from tilewise._seeds import draw_seed
from tilewise._triton import NAMES as KERNELS
from tilewise.block_mask import BlockMask, block_mask_of

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]
Precision = Literal["standard", "strict"]

NO_LENGTHS = (None, None, None, None, 0, 0)
NO_BLOCKS = (None, None, None, None, None, None, 128, 128)


def options_of(
    query: Tensor,
    dropout_p: float,
    alignment: str,
    window: Window | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    draws: bool = True,
) -> tuple[Any, ...]:
    """The operator's arguments from dropout_seed to sinks."""
    check_optional_tensors(alibi_slopes=alibi_slopes, sinks=sinks)
    text_of("alignment", alignment, "top_left", "bottom_right")
    left, right = window_of(window)
    seed = None
    if dropout_p > 0.0:
        check_tensors(query=query)
        # A probability that will be refused draws nothing.
        draws = draws and dropout_p <= 1.0
        seed = draw_seed(query.device) if draws else torch.zeros(2, dtype=torch.int64)
    return seed, alignment == "bottom_right", left, right, number_of("softcap", softcap), alibi_slopes, sinks


def window_of(window: Any) -> Window:
    """(left, right)."""
    if window is None:
        return None, None
    if not isinstance(window, Sequence) or isinstance(window, (str, bytes)) or len(window) != 2:
        reject("window", "(left, right), each None or at least 0", told(window))
    left, right = window
    return (
        None if left is None else whole_of("window[0]", left),
        None if right is None else whole_of("window[1]", right),
    )


def blocks_of(block_mask: Any, query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """The operator's arguments from block_counts to block_k."""
    if block_mask is None:
        return NO_BLOCKS
    check_tensors(query=query, key=key)
    mask = block_mask_of(block_mask, *(x.shape[-2] if x.dim() > 1 else None for x in (query, key)))
    for field in ("counts", "indices", "full_counts", "full_indices", "tile_ids", "tiles"):
        check_optional_tensors(**{f"block_mask.{field}": getattr(mask, field)})
    check_tensors(**{"block_mask.counts": mask.counts, "block_mask.indices": mask.indices})
    sizes = whole_of("block_mask.block_q", mask.block_q), whole_of("block_mask.block_k", mask.block_k)
    _check_lengths(mask, query, key)
    return (
        *(mask.counts, mask.indices, mask.full_counts, mask.full_indices, mask.tile_ids, mask.tiles),
        *sizes,
    )


def _check_lengths(mask: BlockMask, query: Tensor, key: Tensor) -> None:
    """Refuses a mask that was made for other lengths, where it says for which."""
    if min(query.dim(), key.dim()) < 2:
        return
    for name, rows, length in (("query", query, mask.length_q), ("key", key, mask.length_k)):
        field = f"block_mask.length_{name[0]}"
        if length is not None and whole_of(field, length) != rows.shape[-2]:
            reject(field, f"the length of {name}, {rows.shape[-2]}", length)


def how_of(
    query: Tensor,
    kernel: str,
    deterministic: bool,
    precision: str,
    logit_scale: Tensor | None,
    batch_invariant: bool,
) -> tuple[Any, ...]:
    """The operator's arguments from kernel on."""
    check_tensors(query=query)
    check_optional_tensors(logit_scale=logit_scale)
    name = None if text_of("kernel", kernel) == "auto" else kernel
    if name is not None and name not in KERNELS:
        reject("kernel", f"one of auto, {', '.join(KERNELS)}", repr(name))
    tf32 = query.is_cuda and query.dtype == torch.float32 and tf32_allowed()
    invariant = flag_of("batch_invariant", batch_invariant)
    return name, flag_of("deterministic", deterministic), tf32, is_strict(precision), logit_scale, invariant


def is_strict(precision: Any) -> bool:
    return text_of("precision", precision, "standard", "strict") == "strict"


def four_dims(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """The four as `attention` takes them, and the dimensions before the output's last two where that differs.

    Leading dimensions broadcast as in a matrix product; so do heads, unless they may be shared.
    """
    rows = (query, key, value)
    lead = (query.shape[:2], key.shape[:2], value.shape[:2])
    if all(x.dim() == 4 for x in rows) and (enable_gqa or lead[0] == lead[1] == lead[2]):
        return query, key, value, mask, None
    for name, x in zip(("query", "key", "value"), rows, strict=True):
        check_dense(name, x)
        if x.dim() < 2:
            reject(name, "at least rank 2 [..., length, dim]", f"rank {x.dim()}")
    query, key, value = (x.unsqueeze(0) if x.dim() == 2 else x for x in rows)
    outer = broadcast("key", *(x.shape[:-3] for x in (query, key, value)))
    heads = () if enable_gqa else broadcast("key", *(x.shape[-3:-2] for x in (query, key, value)))
    result = (*outer, *(heads or query.shape[-3:-2])) if max(x.dim() for x in rows) > 2 else ()

    batch = math.prod(outer)

    def flat(x: Tensor) -> Tensor:
        inner = (*(heads or x.shape[-3:-2]), *x.shape[-2:])
        return x.expand(*outer, *inner).reshape(batch, *inner)

    if mask is not None and mask.dim() > 3:
        check_dense("attn_mask", mask)
        if broadcast("attn_mask", mask.shape[:-3], outer) != outer:
            reject("attn_mask", f"leading dimensions that broadcast to {list(outer)}", list(mask.shape))
        # A mask that all entries share stays one: neither it nor its gradient is made for each of them.
        shared = mask.shape[:-3].numel() == 1
        whole = mask if shared else mask.expand(*outer, *mask.shape[-3:])
        mask = whole.reshape(1 if shared else batch, *mask.shape[-3:])
    return flat(query), flat(key), flat(value), mask, result


def causal_bias(mask: Any) -> Alignment | None:
    """Where torch's CausalBias, a tensor without data, lines up; None of anything else."""
    if mask is None or type(mask).__module__ != "torch.nn.attention.bias":
        return None
    from torch.nn.attention.bias import CausalVariant  # brings the compiler with it: seconds, where unasked

    return "top_left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def broadcast(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        reject(name, "leading dimensions that broadcast", " and ".join(str(list(s)) for s in shapes))


def tf32_allowed() -> bool:
    """What torch's own products may do: also says what set_float32_matmul_precision and allow_tf32 set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result does, but that loads the compiler: as long again as torch itself.
tf32_allowed.__dict__["_dynamo_marked_constant"] = True


def check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected Tensor, got {type(tensor).__name__}")


def check_optional_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected Tensor, got {type(tensor).__name__}")


def check_shared_heads(enable_gqa: bool, **tensors: Any) -> None:
    """The binding makes this check for dense tensors alone."""
    check_tensors(**tensors)
    heads = [tensor.shape[1] for tensor in tensors.values() if tensor.dim() > 1]
    if not flag_of("enable_gqa", enable_gqa) and len(set(heads)) > 1:
        reject("enable_gqa", f"True for {heads[0]} heads of query and {heads[1]} of keys", "False")
