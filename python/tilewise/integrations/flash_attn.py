"""flash-attn 2's public functions on Tilewise: same names, signatures and meanings, in f32 too.

Three of them also take `s_aux`, the sinks of FlashAttention-3 as transformers passes them, and
`batch_invariant`.

Tensors are [B, S, H, D], or [total, H, D] for packed sequences. `causal` and `window_size` count from the
last query at the last key, a window of -1 has no end, and queries may have more heads than keys. Where
`return_attn_probs` asks for more than the output, that is (out, lse, None): the weights are never formed. A
query that sees no key has out 0 and lse -inf.

>>> from tilewise.integrations.flash_attn import flash_attn_func
>>> q, k, v = torch.randn(2, 5, 8, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
>>> flash_attn_func(q, k, v, causal=True).shape
torch.Size([2, 5, 8, 16])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise._arguments import Window, check_optional_tensors, check_tensors
from tilewise._errors import Error, Unsupported, check_dense, reject, renamed, told
from tilewise._scalars import flag_of, whole_of
from tilewise.attention import attention, attention_decode, attention_varlen

_NAMES = {
    **{"query": "q", "key": "k", "value": "v", "scale": "softmax_scale", "is_causal": "causal"},
    **{"window": "window_size", "window[0]": "window_size[0]", "window[1]": "window_size[1]"},
    **{"page_table": "block_table", "sinks": "s_aux"},
}

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Attention of q [B, Sq, Hq, D] over k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv].

    Args:
        q, k, v: as above; Hq must be a multiple of Hkv.
        dropout_p: probability of dropping a weight; 0 outside training.
        softmax_scale: factor of the score, 1/√D by default.
        causal: whether a query sees no later keys.
        window_size: (left, right), how many keys a query sees to either side of its own; -1 for all.
        softcap: c > 0 replaces each score s by c·tanh(s/c).
        alibi_slopes: f32 [Hq] or [B, Hq]: subtracts slope·abs(i + Sk - Sq - j) from the score.
        deterministic: makes the gradient bitwise repeatable.
        return_attn_probs: returns (out, lse, None).
        s_aux: [Hq], a sink's logit for each head. Has a gradient.
        batch_invariant: makes the bits of a sequence depend on that sequence alone, as in `attention`.

    Returns:
        out [B, Sq, Hq, Dv]; lse is f32 [B, Hq, Sq].

    >>> q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 7, 2, 8)
    >>> out, lse, _ = flash_attn_func(q, k, k, window_size=(4, 0), return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 3, 4, 8]), torch.Size([1, 4, 3]))
    """
    with_lse = flag_of("return_attn_probs", return_attn_probs)
    out, lse = _called(
        attention,
        _heads_first("q", q),
        _heads_first("k", k),
        _heads_first("v", v),
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=True,
        alignment="bottom_right",
        window=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=_sinks(s_aux),
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if with_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [B, S, 3, H, D]; out is [B, S, H, D].

    >>> flash_attn_qkvpacked_func(torch.randn(2, 5, 3, 4, 8), causal=True).shape
    torch.Size([2, 5, 4, 8])
    """
    q, k, v = _unpacked("qkv", qkv, "[B, S, 3, H, D]")
    options: Any = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )
    return flash_attn_func(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q [B, Sq, Hq, D] and kv [B, Sk, 2, Hkv, D]; out is [B, Sq, Hq, D].

    >>> flash_attn_kvpacked_func(torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 1, 8)).shape
    torch.Size([2, 5, 4, 8])
    """
    k, v = _unpacked("kv", kv, "[B, Sk, 2, Hkv, D]")
    options: Any = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Attention within sequences packed one after another: q [total_q, Hq, D], k and v [total_k, Hkv, D].

    Args:
        q, k, v: as above; with `block_table`, k and v are pages [num_blocks, page, Hkv, D].
        cu_seqlens_q: int32 [B + 1], from 0 on: where in q each sequence begins, and the last one's end.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: at least the longest sequence of queries.
        max_seqlen_k: at least the longest sequence of keys.
        block_table: int32 [B, max_blocks]: the pages of each sequence. Their keys are gathered into a copy.

    The others are those of `flash_attn_func`.

    Returns:
        out [total_q, Hq, D]; lse is f32 [Hq, total_q].

    >>> q, ends = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, ends, ends, 4, 4, causal=True).shape
    torch.Size([7, 2, 8])
    """
    if block_table is not None:
        k, v = (_gathered(x, block_table, cu_seqlens_k) for x in (k, v))
    with_lse = flag_of("return_attn_probs", return_attn_probs)
    out, lse = _called(
        attention_varlen,
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        alignment="bottom_right",
        window=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=_sinks(s_aux),
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=True,
    )
    return (out, lse, None) if with_lse else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv [total, 3, H, D]; out is [total, H, D].

    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 2, 8), ends, 4).shape
    torch.Size([7, 2, 8])
    """
    q, k, v = _unpacked("qkv", qkv, "[total, 3, H, D]")
    options: Any = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q [total_q, Hq, D] and kv [total_k, 2, Hkv, D]; out is [total_q, Hq, D].

    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> q, kv = torch.randn(7, 4, 8), torch.randn(7, 2, 2, 8)
    >>> flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 4, 4).shape
    torch.Size([7, 4, 8])
    """
    k, v = _unpacked("kv", kv, "[total_k, 2, Hkv, D]")
    options: Any = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Attention of new tokens over a cache, to which their own keys and values may be appended first.

    Args:
        q: [B, Sq, Hq, D].
        k_cache: [B_cache, S_cache, Hkv, D], or [num_blocks, page, Hkv, D] with `block_table`.
        v_cache: likewise.
        k, v: [B, S_new, Hkv, D], written into the caches from `cache_seqlens` on; they count among the keys.
        rotary_cos, rotary_sin: [S_rotary, R/2]: turn the first R of D in k, and in q, by the angles of their
            positions. Without `causal` or a window all queries stand at position `cache_seqlens`.
        cache_seqlens: int or int32 [B], the keys in use before k is appended; the whole cache by default.
        cache_batch_idx: int32 [B]: which entry of the cache each entry of q uses.
        cache_leftpad: not supported.
        block_table: int32 [B, max_blocks]: the pages of each sequence.
        rotary_interleaved: whether the pairs to turn are neighbours, or a half of R apart.
        num_splits: a hint about speed, unused.
        return_softmax_lse: returns (out, lse).

    The others are those of `flash_attn_func`. There is no gradient.

    Returns:
        out [B, Sq, Hq, D]; lse is f32 [B, Hq, Sq].

    >>> k_cache, v_cache, q = torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8), torch.randn(2, 1, 4, 8)
    >>> k = torch.randn(2, 1, 2, 8)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=3, causal=True).shape
    torch.Size([2, 1, 4, 8])
    >>> torch.equal(k_cache[:, 3], k[:, 0])
    True
    """
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_optional_tensors(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    check_optional_tensors(cache_batch_idx=cache_batch_idx, block_table=block_table)
    if cache_leftpad is not None:
        raise Unsupported("cache_leftpad: not supported; start each sequence of the cache at 0")
    if block_table is not None and cache_batch_idx is not None:
        reject("cache_batch_idx", "none with block_table", "both")
    if (k is None) != (v is None):
        reject("v" if v is None else "k", "k and v together", "one of them")
    _check_rows(q, k_cache, v_cache, k, v)
    window, with_lse = _window(window_size), flag_of("return_softmax_lse", return_softmax_lse)
    table = block_table
    if cache_batch_idx is not None:  # an entry of the cache is a page that holds the whole of it
        given = cache_batch_idx
        if given.shape != q.shape[:1] or given.dtype not in (torch.int32, torch.int64):
            expected = f"int32 or int64 [B] = {list(q.shape[:1])}"
            reject("cache_batch_idx", expected, f"{given.dtype} {list(given.shape)}")
        table = cache_batch_idx[:, None].int()
    if table is not None and (table.dim() != 2 or len(table) != len(q) or table.dtype != torch.int32):
        expected = f"int32 [B, max_blocks] with B {len(q)}"
        reject("block_table", expected, f"{table.dtype} {list(table.shape)}")
    lengths = _lengths(cache_seqlens, q, k_cache, table, appends=k is not None)
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            reject("rotary_cos", "rotary_sin, k and v as well", "only some of them")
        _check_angles(rotary_cos, rotary_sin, q)
        angles = (rotary_cos, rotary_sin, flag_of("rotary_interleaved", rotary_interleaved))
        advances = flag_of("causal", causal) or window is not None
        q = _rotated(q, _positions(lengths, q.shape[1] if advances else 1), *angles)
        k = _rotated(k, _positions(lengths, k.shape[1]), *angles)
    if k is not None and v is not None:
        new = _positions(lengths, k.shape[1])
        _check_room(lengths, k.shape[1], k_cache.shape[1] * (1 if table is None else table.shape[1]))
        lengths = lengths + k.shape[1]
        at = _slots(new, k_cache.shape[1], table)
        _check_pages(at[0], k_cache.shape[0], "cache_batch_idx" if block_table is None else "block_table")
        k_cache[at] = k
        v_cache[at] = v
    out, lse = _called(
        attention_decode,
        _heads_first("q", q),
        _heads_first("k_cache", k_cache),
        _heads_first("v_cache", v_cache),
        lengths,
        table,
        is_causal=causal,
        scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=_sinks(s_aux),
        batch_invariant=batch_invariant,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse) if with_lse else out


def _called(attend: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The call, whose exceptions speak of arguments by flash-attn's names."""
    try:
        return attend(*arguments, **options)
    except (Error, TypeError) as error:
        raise renamed(error, _NAMES) from None


def _heads_first(name: str, rows: Tensor) -> Tensor:
    """[B, S, H, D] as [B, H, S, D]."""
    check_tensors(**{name: rows})
    if rows.dim() != 4:
        reject(name, "rank 4 [B, S, H, D]", list(rows.shape))
    return rows.transpose(1, 2)


def _window(size: tuple[int, int]) -> Window | None:
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        reject("window_size", "(left, right), -1 for no limit", told(size))
    left, right = (
        None if whole_of(f"window_size[{side}]", extent) < 0 else extent for side, extent in enumerate(size)
    )
    return None if left is right is None else (left, right)


def _sinks(s_aux: Tensor | None) -> Tensor | None:
    """In f32; transformers passes them in the type of q."""
    check_optional_tensors(s_aux=s_aux)
    return s_aux.float() if s_aux is not None and s_aux.is_floating_point() else s_aux


def _unpacked(name: str, packed: Tensor, shape: str) -> tuple[Tensor, ...]:
    check_tensors(**{name: packed})
    parts, rank = len(name), shape.count(",") + 1
    if packed.dim() != rank or packed.shape[-3] != parts:
        reject(name, shape, list(packed.shape))
    return packed.unbind(-3)


def _gathered(pages: Tensor, block_table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[num_blocks, page, H, D] as [total, H, D], one sequence after another."""
    check_tensors(k=pages, block_table=block_table, cu_seqlens_k=cu_seqlens)
    if pages.dim() != 4 or pages.shape[1] == 0:
        reject("k", "pages [num_blocks, page, H, D]", list(pages.shape))
    if cu_seqlens.dim() != 1 or block_table.dim() != 2 or len(block_table) + 1 != len(cu_seqlens):
        reject("block_table", "int32 [B, max_blocks] for cu_seqlens_k [B + 1]", list(block_table.shape))
    token = torch.arange(int(cu_seqlens[-1]), device=pages.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    position = token - cu_seqlens[sequence]
    page = pages.shape[1]
    return pages[block_table[sequence, position // page], position % page]


def _lengths(
    given: int | Tensor | None, q: Tensor, cache: Tensor, table: Tensor | None, appends: bool
) -> Tensor:
    """int32 [B]: keys in use before any are appended."""
    if given is None and appends:
        reject("cache_seqlens", "an int or int32 [B] with k and v", None)
    if isinstance(given, Tensor):
        if given.dtype != torch.int32 or given.shape != q.shape[:1]:
            reject("cache_seqlens", f"int32 [B] = {list(q.shape[:1])}", f"{given.dtype} {list(given.shape)}")
        return given
    if given is not None and not 0 <= whole_of("cache_seqlens", given) < 2**31:
        reject("cache_seqlens", "0 or above and below 2^31", given)
    if given is None:
        given = cache.shape[1] * (1 if table is None else table.shape[1])
    return torch.full((q.shape[0],), given, dtype=torch.int32, device=q.device)


def _check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, x)
        if x.dim() != 4:
            reject(name, "rank 4 [B, S, H, D]", list(x.shape))
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new is None or k is None:
            continue
        shape = (q.shape[0], k.shape[1] if k.dim() > 1 else 0, *cache.shape[2:])
        if tuple(new.shape) != shape or new.dtype != cache.dtype:
            reject(
                name, f"{cache.dtype} [B, S_new, Hkv, D] = {list(shape)}", f"{new.dtype} {list(new.shape)}"
            )


def _check_angles(cos: Tensor, sin: Tensor, q: Tensor) -> None:
    if cos.dim() != 2 or 2 * cos.shape[-1] > q.shape[-1]:
        reject("rotary_cos", f"[S_rotary, R/2] with R up to {q.shape[-1]}", list(cos.shape))
    if sin.shape != cos.shape:
        reject("rotary_sin", f"the shape of rotary_cos, {list(cos.shape)}", list(sin.shape))


# Before anything is written. On a device the host cannot look, as everywhere in the library.


def _can_be_read(indices: Tensor) -> bool:
    return indices.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_room(lengths: Tensor, new: int, capacity: int) -> None:
    if not _can_be_read(lengths):
        return
    if (lengths < 0).any():
        reject("cache_seqlens", "0 or above", int(lengths.min()))
    if (lengths + new > capacity).any():
        reject("cache_seqlens", f"at most {capacity} with the new keys", int(lengths.max()) + new)


def _check_pages(used: Tensor, pages: int, name: str) -> None:
    if not _can_be_read(used) or used.numel() == 0:
        return
    least, most = int(used.min()), int(used.max())
    if least < 0 or most >= pages:
        reject(name, f"numbers from 0 to {pages - 1}", least if least < 0 else most)


def _positions(lengths: Tensor, count: int) -> Tensor:
    """[B, count] from each length on."""
    return lengths[:, None].long() + torch.arange(count, device=lengths.device)


def _slots(positions: Tensor, page: int, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where in a cache [pages, page, ...] positions [B, S] are; without a table a page for each entry."""
    if table is None:
        return torch.arange(positions.shape[0], device=positions.device)[:, None], positions
    return table.long().gather(1, positions // page), positions % page


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, S, H, D] with its first R of D turned by the angles at positions [B, S or 1]."""
    pairs = cos.shape[-1]
    cos, sin = (angle[positions].unsqueeze(2).float() for angle in (cos, sin))  # [B, S, 1, R/2]
    turned, kept = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    pair_dim, shape = (-1, (pairs, 2)) if interleaved else (-2, (2, pairs))
    a, b = turned.unflatten(-1, shape).unbind(pair_dim)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=pair_dim).flatten(-2)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)
