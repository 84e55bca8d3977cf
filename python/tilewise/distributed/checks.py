"""What a rank was given, checked before ranks exchange messages, and local tensors out of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise._arguments import blocks_of, check_tensors, is_strict, window_of
from tilewise._errors import DENSE_NAMES, VARLEN_NAMES, Unsupported, check_dense, reject, translated
from tilewise._scalars import flag_of, number_of, scale_of, text_of, whole_of
from tilewise._triton import NAMES as KERNELS
from tilewise.attention import explain
from tilewise.block_mask import BlockMask, block_mask_of
from tilewise.distributed.blocks import Blocks
from tilewise.distributed.messages import Mesh

_check_attention = torch.ops.tilewise.check_attention.default

# DTensors


def mesh_of(query: Any, mesh: Mesh) -> Mesh:
    """The mesh that was given, or the one along which a DTensor's tokens are spread."""
    from torch.distributed.tensor import DTensor, Shard

    if mesh is not None or not isinstance(query, DTensor):
        return mesh
    along = [n for n, placement in enumerate(query.placements) if placement == Shard(2)]
    whole = len(along) in (0, query.device_mesh.ndim)
    return query.device_mesh if whole else query.device_mesh.get_group(along[0])


def local_of(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of DTensors along the sequence; other tensors as they are."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rows = dict(query=query, key=key, value=value)
    if not isinstance(query, DTensor):
        for name, x in rows.items():
            if isinstance(x, DTensor):
                reject(name, "a Tensor like query", "a DTensor")
        return query, key, value
    placements = query.placements
    for name, x in rows.items():
        if not isinstance(x, DTensor) or x.device_mesh != query.device_mesh or x.placements != placements:
            found = x.placements if isinstance(x, DTensor) else type(x).__name__
            reject(name, f"a DTensor with the mesh and placements of query, {placements}", found)
    if Shard(2) not in placements:
        reject("query", "a DTensor sharded along dimension 2", placements)
    if any(placement not in (Replicate(), *map(Shard, range(3))) for placement in placements):
        reject("query", "a DTensor replicated or sharded along dimensions 0 to 2", placements)
    return query.to_local(), key.to_local(), value.to_local()


def like_query(query: Any, local: Tensor) -> Tensor:
    """A result of this rank, as a DTensor if query is one."""
    from torch.distributed.tensor import DTensor

    if not isinstance(query, DTensor):
        return local
    shape = torch.Size((*query.shape[:3], *local.shape[3:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = query.device_mesh, query.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _per_head_shape(name: str, x: Any, query: Any) -> list[int]:
    """The shape that `local_per_head` gives numbers [Hq] or [B, Hq]. Ranks exchange nothing for it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    check_tensors(**{name: x})
    if not isinstance(x, DTensor):
        _check_plain(name, x)
        return list(x.shape)
    if not isinstance(query, DTensor):
        reject(name, "a Tensor like query", "a DTensor")
    if x.device_mesh != query.device_mesh:
        reject(name, f"a DTensor on query's mesh, {query.device_mesh}", x.device_mesh)
    if any(placement not in (Replicate(), *map(Shard, range(x.dim()))) for placement in x.placements):
        reject(name, "a DTensor that is replicated or sharded by heads", x.placements)
    shape, own, whole = list(x.shape), query.to_local().shape, query.shape
    if len(shape) not in (1, 2):
        return shape
    return [own[n] if size == whole[n] else size for n, size in enumerate(shape, 2 - len(shape))]


def local_per_head(x: Any, query: Any) -> Any:
    """Numbers of this rank's heads out of a DTensor [Hq] or [B, Hq]; anything else stays as it is.

    `query` is as the call was given it. The gradient is placed as the DTensor and summed over the mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    if not isinstance(x, DTensor):
        return x
    placed: list[Placement] = []
    of_gradient: list[Placement] = []
    for of_query in query.placements:
        if of_query == Shard(1):
            placed.append(Shard(x.dim() - 1))
            of_gradient.append(placed[-1])
        elif of_query == Shard(0) and x.dim() == 2:
            placed.append(Shard(0))
            of_gradient.append(placed[-1])
        else:  # ranks with other queries have shares of the gradient, ranks with the same ones all of it
            placed.append(Replicate())
            of_gradient.append(Replicate() if of_query == Replicate() else Partial())
    return x.redistribute(placements=placed).to_local(grad_placements=of_gradient)


# Tensors


def _check_plain(name: str, x: Any) -> None:
    """A tensor in memory, all of it on this rank."""
    from torch.distributed.tensor import DTensor

    check_tensors(**{name: x})
    if isinstance(x, DTensor):
        reject(name, "a Tensor with this rank's part", "a DTensor")
    check_dense(name, x)
    if x.is_meta:
        reject(name, "a tensor with memory", "a meta tensor")


def check_call(
    whole: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    of_heads: dict[str, Any],
    settings: dict[str, Any],
    enable_gqa: Any,
    starts: tuple[tuple[int, ...], ...] | None = None,
) -> None:
    """The library's own checks of what this rank has. A rank without queries calls no kernel that makes them.

    `whole` is query as the call was given it, `rows` and `mask` are of this rank.
    """
    query, key, value = rows
    for name, x in zip(("query", "key", "value"), rows, strict=True):
        _check_plain(name, x)
    given = {name: (x, list(x.shape)) for name, x in zip(("query", "key", "value"), rows, strict=True)}
    given |= {name: (x, _per_head_shape(name, x, whole)) for name, x in of_heads.items() if x is not None}
    if mask is not None:
        _check_plain("attn_mask", mask)
        given["attn_mask"] = (mask, list(mask.shape))
        if key.dim() == 4 and key.shape[:3] == value.shape[:3] and mask.dim() and mask.shape[-1] != 1:
            for name in ("key", "value"):  # it has those of all ranks
                given[name][1][2] = mask.shape[-1]
    slopes = of_heads["alibi_slopes"]
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise Unsupported("alibi_slopes: no gradient is computed for them; detach them")
    for name, (x, _) in given.items():
        if x.device != query.device:
            reject(name, f"memory on {query.device}, as query", x.device)
    options: dict[str, Any] = {
        name: torch.empty(shape, dtype=x.dtype, device="meta") for name, (x, shape) in given.items()
    }
    if settings["dropout_p"] > 0:
        options["dropout_seed"] = torch.zeros(2, dtype=torch.int64)
    if starts is not None:
        for side, of, length in zip("qk", starts, (query, key), strict=True):
            options[f"cumulative_{side}"] = torch.empty(len(of), dtype=torch.int32, device="meta")
            options[f"max_length_{side}"] = length.shape[0] if length.dim() else 0
    options |= settings | dict(kernel_name=None, enable_gqa=flag_of("enable_gqa", enable_gqa))
    try:
        _check_attention(**options)
    except RuntimeError as error:
        raise translated(error, {}, DENSE_NAMES if starts is None else VARLEN_NAMES) from None


def check_mask_keys(mask: Tensor | None, keys: int) -> None:
    if mask is not None and mask.dim() and mask.shape[-1] not in (1, keys):
        reject("attn_mask", f"all {keys} keys of the sequence, or 1", list(mask.shape))


# Block masks

_LISTS = ("counts", "indices", "full_counts", "full_indices", "tile_ids", "tiles")


def check_block_mask_kind(block_mask: Any) -> None:
    if not isinstance(block_mask, (BlockMask, type(None))) and not hasattr(block_mask, "mask_mod"):
        reject("block_mask", "tilewise.BlockMask or torch's BlockMask", type(block_mask).__name__)


def blocks_of_whole(block_mask: Any, rows: tuple[Tensor, ...], length_q: int, length_k: int) -> Blocks:
    """A block mask of the whole sequence, as `tilewise.attention` would check it, numbers in lists too.

    `rows` are this rank's query, key and value: the mask is one of their entries and heads.
    """
    lengths = (length_q, length_k, length_k)
    query, key, value = (  # one row in memory, which is not read
        torch.zeros(x.shape[3], dtype=x.dtype).expand(*x.shape[:2], length, x.shape[3])
        for x, length in zip(rows, lengths, strict=True)
    )
    lists = blocks_of(block_mask, query, key)
    mask = block_mask_of(block_mask, length_q, length_k)
    for name, x in zip(_LISTS, lists, strict=False):
        if x is None:
            continue
        _check_plain(f"block_mask.{name}", x)
        if x.device != rows[0].device:
            reject(f"block_mask.{name}", f"memory on {rows[0].device}, as query", x.device)
    # It makes the checks of a call and computes nothing.
    explain(query, key, value, enable_gqa=True, block_mask=mask.to("cpu"))
    return Blocks.of(mask, length_q, length_k)


# Numbers


def starts_of(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the sequences of queries and of keys begin, and the end of the last."""
    given = {"cu_seqlens_q": cu_seqlens_q}
    if cu_seqlens_k is not None:
        given["cu_seqlens_k"] = cu_seqlens_k
    found: list[tuple[int, ...]] = []
    for name, x in given.items():
        if isinstance(x, Tensor):
            _check_plain(name, x)
            x = x.tolist() if x.dim() == 1 else x
        if not isinstance(x, Sequence) or isinstance(x, (str, bytes)):
            raise TypeError(f"{name}: expected a Tensor of rank 1 or a list, got {type(x).__name__}")
        starts = tuple(whole_of(f"{name}[{n}]", start) for n, start in enumerate(x))
        if not starts or starts[0] != 0 or list(starts) != sorted(starts):
            reject(name, "a first entry of 0 and entries that do not decrease", starts)
        if found and len(starts) != len(found[0]):
            reject(name, f"as many entries as cu_seqlens_q, {len(found[0])}", len(starts))
        found.append(starts)
    return found[0], found[-1]


def settings_of(
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    alignment: Any,
    window: Any,
    softcap: Any,
    kernel: Any,
    deterministic: Any,
    precision: Any,
) -> dict[str, Any]:
    """Attention's options as the operator takes them."""
    text_of("alignment", alignment, "top_left", "bottom_right")
    left, right = window_of(window)
    name = None if text_of("kernel", kernel) == "auto" else kernel
    if name is not None and name not in KERNELS:
        reject("kernel", f"one of auto, {', '.join(KERNELS)}", repr(name))
    return dict(
        dropout_p=number_of("dropout_p", dropout_p),
        is_causal=bool(flag_of("is_causal", is_causal)),
        scale=scale_of(scale),
        bottom_right=alignment == "bottom_right",
        window_left=left,
        window_right=right,
        softcap=number_of("softcap", softcap),
        kernel_name=name,
        deterministic=flag_of("deterministic", deterministic),
        strict=is_strict(precision),
    )
