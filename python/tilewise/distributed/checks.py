"""What a rank was given, checked before ranks exchange messages, and local tensors out of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise._arguments import check_optional_tensors, check_tensors, is_strict, window_of
from tilewise._errors import Unsupported, check_dense, reject
from tilewise._scalars import flag_of, number_of, scale_of, text_of, whole_of
from tilewise._triton import NAMES as KERNELS

Mesh = DeviceMesh | dist.ProcessGroup | None

# The library's words for types, as its own errors have them.
_TYPES = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


# DTensors


def local_of(
    query: Any, key: Any, value: Any, mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor, Mesh, Callable[[Tensor], Tensor]]:
    """Local tensors of DTensors along the sequence, their mesh, and what makes DTensors of results."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(query, DTensor):
        for name, x in (("key", key), ("value", value)):
            if isinstance(x, DTensor):
                reject(name, "a Tensor like query", "a DTensor")
        return query, key, value, mesh, lambda x: x
    device_mesh, placements = query.device_mesh, query.placements
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, DTensor) or x.placements != placements:
            found = x.placements if isinstance(x, DTensor) else type(x).__name__
            reject(name, f"a DTensor with the placements of query, {placements}", found)
    along = [n for n, placement in enumerate(placements) if placement == Shard(2)]
    if not along:
        reject("query", "a DTensor sharded along dimension 2", placements)
    if any(placement not in (Replicate(), *map(Shard, range(3))) for placement in placements):
        reject("query", "a DTensor replicated or sharded along dimensions 0 to 2", placements)
    if mesh is None:
        mesh = device_mesh if len(along) == device_mesh.ndim else device_mesh.get_group(along[0])

    def wrap(local: Tensor) -> Tensor:
        shape = torch.Size((*query.shape[:3], *local.shape[3:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=shape, stride=stride)

    return query.to_local(), key.to_local(), value.to_local(), mesh, wrap


def local_per_head(name: str, x: Any, query: Any) -> Any:
    """Numbers of this rank's heads out of a DTensor [Hq] or [B, Hq]; anything else stays as it is.

    `query` is as the call was given it. The gradient is placed as the DTensor and summed over the mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    if not isinstance(x, DTensor):
        return x
    if not isinstance(query, DTensor):
        reject(name, "a Tensor like query", "a DTensor")
    if x.device_mesh != query.device_mesh:
        reject(name, f"a DTensor on query's mesh, {query.device_mesh}", x.device_mesh)
    if any(placement not in (Replicate(), *map(Shard, range(x.dim()))) for placement in x.placements):
        reject(name, "a DTensor that is replicated or sharded by heads", x.placements)
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


def check_rows(query: Any, key: Any, value: Any, rank: int) -> None:
    check_tensors(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_plain(name, x)
        if x.dim() != rank:
            reject(name, f"rank {rank}", f"rank {x.dim()}")
        if x.dtype != query.dtype:
            reject(name, f"the type of query, {query.dtype}", x.dtype)
        if x.device != query.device:
            reject(name, f"memory on {query.device}, as query", x.device)
    if key.shape[:-1] != value.shape[:-1]:
        reject("value", f"the shape of key except its last extent, {list(key.shape[:-1])}", list(value.shape))
    if key.shape[-1] != query.shape[-1]:
        reject("key", f"the head dim of query, {query.shape[-1]}", key.shape[-1])
    if rank == 4 and key.shape[0] != query.shape[0]:
        reject("key", f"the batch of query, {query.shape[0]}", key.shape[0])


def _check_plain(name: str, x: Tensor) -> None:
    """A tensor in memory, all of it on this rank."""
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor):
        reject(name, "a Tensor with this rank's part", "a DTensor")
    check_dense(name, x)
    if x.is_meta:
        reject(name, "a tensor with memory", "a meta tensor")


def check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    heads_q, heads_k = query.shape[1], key.shape[1]
    if heads_q != heads_k and not flag_of("enable_gqa", enable_gqa):
        reject("enable_gqa", f"True where query has {heads_q} heads and key {heads_k}", "False")
    if heads_k == 0 or heads_q % heads_k:
        reject("query", f"a multiple of key's {heads_k} heads", heads_q)


def check_per_head(query: Tensor, slopes: Any, sinks: Any, logit_scale: Any, entries: int) -> None:
    """Here, as a rank without queries calls no kernel that would."""
    given = dict(alibi_slopes=slopes, sinks=sinks, logit_scale=logit_scale)
    check_optional_tensors(**given)
    heads = query.shape[1]
    for name, x in given.items():
        if x is None:
            continue
        _check_plain(name, x)
        by_entry = name == "alibi_slopes" and list(x.shape) == [entries, heads]
        if list(x.shape) != [heads] and not by_entry:
            more = f" or [{entries}, {heads}]" if name == "alibi_slopes" else ", one for each head of query"
            reject(name, f"[{heads}]{more}", list(x.shape))
        if x.dtype != torch.float32 and not (x.dtype == query.dtype == torch.float64):
            reject(name, "f32", _TYPES.get(x.dtype, str(x.dtype).removeprefix("torch.")))
        if x.device != query.device:
            reject(name, f"memory on {query.device}, as query", x.device)
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise Unsupported("alibi_slopes: no gradient is computed for them; detach them")


def check_mask(mask: Any, query: Tensor) -> None:
    if mask is None:
        return
    check_optional_tensors(attn_mask=mask)
    _check_plain("attn_mask", mask)
    shape = [1] * (4 - mask.dim()) + list(mask.shape)
    for n, whole in enumerate(query.shape[:3]):
        if len(shape) != 4 or shape[n] not in (1, whole):
            expected = f"a shape that broadcasts to {list(query.shape[:3])} and all keys"
            reject("attn_mask", expected, list(mask.shape))


def check_mask_keys(mask: Tensor | None, keys: int) -> None:
    if mask is not None and mask.shape[-1] not in (1, keys):
        reject("attn_mask", f"all {keys} keys of the sequence, or 1", list(mask.shape))


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
    if any(side is not None and side < 0 for side in (left, right)):
        reject("window", "(left, right), each None or at least 0", repr(window))
    if not 0 <= number_of("dropout_p", dropout_p) < 1:
        reject("dropout_p", "a number in [0, 1)", dropout_p)
    name = None if text_of("kernel", kernel) == "auto" else kernel
    if name is not None and name not in KERNELS:
        reject("kernel", f"one of auto, {', '.join(KERNELS)}", repr(name))
    return dict(
        dropout_p=float(dropout_p),
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
