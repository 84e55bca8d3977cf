"""Attention, under the names and with the meanings PyTorch users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import _binding, _ops
from tilewise._errors import DECODE_NAMES, DENSE_NAMES, VARLEN_NAMES, Unsupported, reject, translated
from tilewise._seeds import draw_seed
from tilewise.block_mask import block_mask_of

_inference = _binding.attention_inference._op  # OpOverload.__call__ would only call it
_inference_masked = _binding.attention_inference_masked._op
_plain_calls = _ops.plain_calls
_compiler = torch.compiler
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: Any = None,
    kernel: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention: softmax(score(query, key)) value, with everything that may change the score.

    Args:
        query: [B, Hq, Sq, D] in f32, f16 or bf16 (f64 through the reference kernel), any strides.
        key: [B, Hkv, Sk, D]; Hq must be a multiple of Hkv, and equal it unless `enable_gqa`.
        value: [B, Hkv, Sk, Dv]; Dv may differ from D.
        attn_mask: broadcasts to [B, Hq, Sq, Sk]; boolean (true attends), or floating and added to the score.
            A floating mask has a gradient.
        dropout_p: probability of dropping a weight; the seed comes from torch's generator of the device.
        is_causal: query i sees keys up to its own position.
        scale: factor of the score, 1/√D by default.
        enable_gqa: whether several heads of `query` may share one of `key` and `value`.
        alignment: where `is_causal` and `window` count positions from. "top_left": query i stands at key i;
            "bottom_right": the last query stands at the last key.
        window: (left, right), each None or at least 0: how many keys a query sees to either side of its own.
        softcap: c > 0 replaces each score s by c·tanh(s/c).
        alibi_slopes: f32 [Hq] or [B, Hq]: subtracts slope·abs(i + Sk - Sq - j) from the score.
        sinks: f32 [Hq]: a logit for each head that joins the denominator alone. Has a gradient.
        block_mask: `tilewise.BlockMask` or torch's BlockMask, with its meaning.
        kernel: name of the kernel, or "auto"; see `explain`.
        deterministic: makes the gradient bitwise repeatable, as torch.use_deterministic_algorithms does.
            The output always is.
        return_lse: also returns the logarithm of the softmax's denominator.

    Returns:
        out [B, Hq, Sq, Dv], or (out, lse) with lse [B, Hq, Sq] in f32, both differentiable. A query that sees
        no key has out 0 and lse -inf.

    >>> q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(attention(q, k, v, is_causal=True), expected, atol=1e-5)
    True
    >>> out, lse = attention(q, k, v, window=(4, 0), softcap=20.0, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 4, 16, 8]), torch.Size([2, 4, 16]))
    """
    if (
        dropout_p == 0.0
        and window is None
        and alibi_slopes is None
        and sinks is None
        and block_mask is None
        and softcap == 0.0
        and alignment == "top_left"
        and kernel == "auto"
        and not return_lse
        and (out := _plain(query, key, value, attn_mask, is_causal, scale, enable_gqa, deterministic))
        is not None
    ):
        return out
    arguments = (
        *(query, key, value, attn_mask, _number("dropout_p", dropout_p)),
        *(is_causal, _scale(scale), enable_gqa),
        *_options(query, dropout_p, alignment, window, softcap, alibi_slopes, sinks),
        *_NO_LENGTHS,
        *_blocks(block_mask),
        *_how(query, kernel, deterministic),
    )
    out, lse = _run(_ops.forward, arguments, DENSE_NAMES)
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, signature and meaning.

    Shapes: query [..., Hq, Sq, D], key [..., Hkv, Sk, D], value [..., Hkv, Sk, Dv], out [..., Hq, Sq, Dv];
    leading dimensions broadcast, and attn_mask broadcasts to [..., Hq, Sq, Sk].

    >>> q, k, v = (torch.randn(3, 5, 8) for _ in range(3))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([3, 5, 8])
    """
    alignment: Alignment = "top_left"
    if type(attn_mask) is not Tensor and (corner := _causal_bias(attn_mask)) is not None:
        alignment = corner
        attn_mask, is_causal = None, True
    elif dropout_p == 0.0:
        out = _plain(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    _check_tensors(query=query, key=key, value=value)
    query, key, value, attn_mask, batch = _four_dims(query, key, value, attn_mask, enable_gqa)
    out = attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment=alignment
    )
    return out if batch is None else out.reshape(*batch, *out.shape[-2:])


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention within sequences of different lengths, packed one after another without padding.

    Args:
        query: [total_q, Hq, D].
        key: [total_k, Hkv, D].
        value: [total_k, Hkv, Dv].
        cu_seqlens_q: int32 [sequences + 1], from 0 on: sequence n owns the queries cu_seqlens_q[n] up to
            cu_seqlens_q[n + 1]. Rows after the last sequence are given zeros.
        cu_seqlens_k: the same for keys and values.
        max_seqlen_q: at least the longest sequence of queries.
        max_seqlen_k: at least the longest sequence of keys.

    The others are those of `attention`, with [sequences] in the place of [B].

    Returns:
        out [total_q, Hq, Dv], or (out, lse) with lse [Hq, total_q].

    >>> q, k, v = (torch.randn(7, 2, 8) for _ in range(3))
    >>> lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> out = attention_varlen(q, k, v, lengths, lengths, 4, 4, is_causal=True)
    >>> first = attention(*(x[None, :3].transpose(1, 2) for x in (q, k, v)), is_causal=True)
    >>> torch.allclose(out[:3], first[0].transpose(0, 1), atol=1e-6)
    True
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        reject("cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k", "int32 [sequences + 1]", None)
    _check_shared_heads(enable_gqa, query=query, key=key)
    arguments = (
        *(query, key, value, None, _number("dropout_p", dropout_p), is_causal, _scale(scale), True),
        *_options(query, dropout_p, alignment, window, softcap, alibi_slopes, sinks),
        *(None, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *_NO_BLOCKS,
        *_how(query, kernel, deterministic),
    )
    out, lse = _run(_ops.forward, arguments, VARLEN_NAMES)
    return (out, lse) if return_lse else out


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    alignment: Alignment = "bottom_right",
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention from the newest tokens to a cache that already holds their keys and values.

    Args:
        query: [B, Hq, Sq, D], the last Sq positions of each sequence.
        k_cache: [B, Hkv, S, D]; or, with `page_table`, [pages, Hkv, page, D], in any strides.
        v_cache: likewise with Dv.
        cache_seqlens: int32 [B]: how many keys of each sequence are in use, the new ones among them.
        page_table: int32 [B, max_pages]: where the keys n·page up to (n + 1)·page of a sequence are.

    The others are those of `attention`, but positions count from the last query at the last key in use
    ("bottom_right"), and heads may share keys and values unless `enable_gqa` is False. There is no gradient
    through pages.

    Returns:
        out [B, Hq, Sq, Dv], or (out, lse) with lse [B, Hq, Sq].

    >>> q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 32, 16), torch.randn(2, 2, 32, 16)
    >>> attention_decode(q, k, v, torch.tensor([5, 32], dtype=torch.int32)).shape
    torch.Size([2, 8, 1, 16])
    >>> pages = torch.arange(4, dtype=torch.int32).view(2, 2)  # two pages of 16 keys for each sequence
    >>> k_pages, v_pages = (x.unflatten(2, (2, 16)).transpose(1, 2).flatten(0, 1) for x in (k, v))
    >>> attention_decode(q, k_pages, v_pages, torch.tensor([5, 32], dtype=torch.int32), pages).shape
    torch.Size([2, 8, 1, 16])
    """
    if cache_seqlens is None:
        reject("cache_seqlens", "int32 [B]", None)
    _check_shared_heads(enable_gqa, query=query, k_cache=k_cache)
    arguments = (
        *(query, k_cache, v_cache, None, _number("dropout_p", dropout_p), is_causal, _scale(scale), True),
        *_options(query, dropout_p, alignment, window, softcap, alibi_slopes, sinks),
        *(cache_seqlens, page_table, None, None, 0, 0),
        *_NO_BLOCKS,
        *_how(query, kernel, deterministic),
    )
    out, lse = _run(_ops.forward, arguments, DECODE_NAMES)
    return (out, lse) if return_lse else out


def merge_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention of the same queries over disjoint sets of keys into attention over all of them.

    Args:
        outs: of each part, [..., Sq, Dv].
        lses: of each part, [..., Sq], as `return_lse=True` gives them. A sink belongs into one part alone.

    Returns:
        (out, lse) over all keys; out in the type of `outs`, computed in f32 or wider. Differentiable.

    >>> q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    >>> parts = [attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 6), slice(6, 10))]
    >>> out, lse = merge_states(*zip(*parts))
    >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
    True
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (Sequence, Tensor)) or not all(isinstance(x, Tensor) for x in given):
            raise TypeError(f"{name}: expected a sequence of Tensor, got {given!r}")
    if len(outs) != len(lses) or len(outs) == 0:
        reject("lses", "as many as outs, at least one", f"{len(lses)} for {len(outs)}")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            reject("outs", f"parts of one shape, with lses {list(outs[0].shape[:-1])}",
                   f"out {list(out.shape)} and lse {list(lse.shape)}")  # fmt: skip
    parts = torch.stack(tuple(lses))
    # A row that sees nothing in any part has lse -inf throughout: shifting by 0 keeps it, and 0/0 out.
    shift = parts.detach().amax(0)
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    weights = torch.exp(parts - shift)
    total = weights.sum(0)
    safe = torch.where(total == 0, 1.0, total)
    shares = (weights / safe).unsqueeze(-1)
    out = sum(share * out.to(share.dtype) for share, out in zip(shares, outs, strict=True))
    lse = torch.where(total == 0, -torch.inf, torch.log(safe) + shift)
    return out.to(outs[0].dtype), lse


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: Any = None,
    kernel: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> str:
    """Which kernel `attention` would run for these arguments, and why the others would not.

    One line for each kernel, fastest first: chosen, able, or why it cannot. Where a gradient would be
    recorded, the backward pass follows.

    >>> q = torch.randn(1, 2, 16, 8)
    >>> print(explain(q, q, q, is_causal=True))  # doctest: +ELLIPSIS
    forward f32 dense B1 Hq2 Hkv2 Sq16 Sk16 D8 Dv8 on cpu, causal
    ...  simd: chosen
      reference: able
    """
    arguments = (
        *(query, key, value, attn_mask, _number("dropout_p", dropout_p)),
        *(is_causal, _scale(scale), enable_gqa),
        *_options(query, dropout_p, alignment, window, softcap, alibi_slopes, sinks, draws=False),
        *_NO_LENGTHS,
        *_blocks(block_mask),
        *_how(query, kernel, deterministic),
    )
    return _run(_ops.explain, arguments, DENSE_NAMES)


_NO_LENGTHS = (None, None, None, None, 0, 0)
_NO_BLOCKS = (None, None, None, None, None, None, 128, 128)


def _run(call: Callable[[tuple[Any, ...]], Any], arguments: tuple[Any, ...], names: Mapping[str, str]) -> Any:
    try:
        return call(arguments)
    except (RuntimeError, AttributeError) as error:
        raise translated(error, _ops.named(arguments), names) from None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    deterministic: bool = False,
) -> Tensor | None:
    """A call without options by the shortest way, or None where it is not that or fails.

    What is left to the general way: tracing, functorch's transforms, repeatable gradients, and telling of
    errors. Nothing here is called through a module: on tiny tensors that would be seen.
    """
    try:
        if _is_dynamo_compiling() or _compiler._is_compiling_flag:  # is_compiling(), at a quarter of its cost
            return None
        if _transforms_active() or forward_ad._current_level >= 0:
            return None
        options, training = _plain_calls[is_causal, scale, enable_gqa, query.is_cuda and _tf32_allowed()]
        if _is_grad_enabled() and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (mask is not None and mask.requires_grad)
        ):
            if deterministic:
                return None
            if _is_any_autocast_enabled():  # a gradient belongs to what was cast, so before it is recorded
                query, key, value, mask = _ops.autocast((query, key, value, mask))
            return training(query, key, value) if mask is None else training(query, key, value, mask)
        if mask is None:
            return _inference(query, key, value, options)
        return _inference_masked(query, key, value, options, mask)
    except (RuntimeError, AttributeError, TypeError, AssertionError):
        return None


def _options(
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
    if alignment not in ("top_left", "bottom_right"):
        reject("alignment", "'top_left' or 'bottom_right'", repr(alignment))
    if window is None:
        left = right = None
    elif isinstance(window, Sequence) and len(window) == 2:
        left, right = window
    else:
        reject("window", "(left, right), each None or at least 0", repr(window))
    seed = None
    if dropout_p > 0.0:
        _check_tensors(query=query)
        # A probability that will be refused draws nothing.
        draws = draws and dropout_p < 1.0
        seed = draw_seed(query.device) if draws else torch.zeros(2, dtype=torch.int64)
    return seed, alignment == "bottom_right", left, right, _number("softcap", softcap), alibi_slopes, sinks


def _number(name: str, value: Any) -> float:
    if value is None or isinstance(value, (str, list, tuple)):
        raise TypeError(f"{name}: expected float, got {type(value).__name__}")
    _check_no_gradient(name, value)
    return float(value)


def _scale(scale: Any) -> Any:
    _check_no_gradient("scale", scale)
    return scale


def _check_no_gradient(name: str, value: Any) -> None:
    """torch would make a number of it without a word, and a parameter would never be trained."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        advice = "multiply query by it, or detach it" if name == "scale" else "detach it"
        raise Unsupported(f"{name}: no gradient is computed for it; {advice}")


def _blocks(block_mask: Any) -> tuple[Any, ...]:
    """The operator's arguments from block_counts to block_k."""
    if block_mask is None:
        return _NO_BLOCKS
    mask = block_mask_of(block_mask)
    return (
        *(mask.counts, mask.indices, mask.full_counts, mask.full_indices, mask.tile_ids, mask.tiles),
        *(mask.block_q, mask.block_k),
    )


def _how(query: Tensor, kernel: str, deterministic: bool) -> tuple[Any, ...]:
    """The operator's arguments from kernel on."""
    _check_tensors(query=query)
    tf32 = query.is_cuda and query.dtype == torch.float32 and _tf32_allowed()
    return None if kernel == "auto" else kernel, deterministic, tf32


def _four_dims(
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
        if x.dim() < 2:
            reject(name, "at least rank 2 [..., length, dim]", f"rank {x.dim()}")
    query, key, value = (x.unsqueeze(0) if x.dim() == 2 else x for x in rows)
    outer = _broadcast("key", *(x.shape[:-3] for x in (query, key, value)))
    heads = () if enable_gqa else _broadcast("key", *(x.shape[-3:-2] for x in (query, key, value)))
    result = (*outer, *(heads or query.shape[-3:-2])) if max(x.dim() for x in rows) > 2 else ()

    def flat(x: Tensor) -> Tensor:
        inner = (*(heads or x.shape[-3:-2]), *x.shape[-2:])
        return x.expand(*outer, *inner).reshape(-1, *inner)

    if mask is not None and mask.dim() > 3:
        if _broadcast("attn_mask", mask.shape[:-3], outer) != outer:
            reject("attn_mask", f"leading dimensions that broadcast to {list(outer)}", list(mask.shape))
        mask = mask.expand(*outer, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    return flat(query), flat(key), flat(value), mask, result


def _causal_bias(mask: Any) -> Alignment | None:
    """Where torch's CausalBias, a tensor without data, lines up; None of anything else."""
    if mask is None or type(mask).__module__ != "torch.nn.attention.bias":
        return None
    from torch.nn.attention.bias import CausalVariant  # brings the compiler with it: seconds, where unasked

    return "top_left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def _broadcast(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        reject(name, "leading dimensions that broadcast", " and ".join(str(list(s)) for s in shapes))


def _tf32_allowed() -> bool:
    """What torch's own products may do: also says what set_float32_matmul_precision and allow_tf32 set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result does, but that loads the compiler: as long again as torch itself.
_tf32_allowed.__dict__["_dynamo_marked_constant"] = True


def _check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected Tensor, got {type(tensor).__name__}")


def _check_shared_heads(enable_gqa: bool, **tensors: Any) -> None:
    """The binding makes this check for dense tensors alone."""
    _check_tensors(**tensors)
    heads = [tensor.shape[1] for tensor in tensors.values() if tensor.dim() > 1]
    if not enable_gqa and len(set(heads)) > 1:
        reject("enable_gqa", f"True for {heads[0]} heads of query and {heads[1]} of keys", "False")
