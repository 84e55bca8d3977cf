"""Attention, under the names and with the meanings PyTorch users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import _binding, _ops
from tilewise._arguments import (
    NO_BLOCKS,
    NO_LENGTHS,
    Alignment,
    Precision,
    Window,
    blocks_of,
    causal_bias,
    check_optional_tensors,
    check_shared_heads,
    check_tensors,
    four_dims,
    how_of,
    options_of,
    tf32_allowed,
)
from tilewise._documents import Documents, as_packed, from_packed
from tilewise._errors import DECODE_NAMES, DENSE_NAMES, VARLEN_NAMES, reject, told, translated
from tilewise._scalars import flag_of, number_of, scale_of, whole_of
from tilewise.block_mask import BlockMask

_inference = _binding.attention_inference._op  # OpOverload.__call__ would only call it
_inference_masked = _binding.attention_inference_masked._op
_plain_calls = _ops.plain_calls
_compiler = torch.compiler
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_tracing = torch._C._is_tracing
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active


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
    logit_scale: Tensor | None = None,
    block_mask: Any = None,
    kernel: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Precision = "standard",
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
        logit_scale: f32 [Hq]: a factor for each head that multiplies `scale`, as Swin v2 learns it. Has a
            gradient.
        block_mask: `tilewise.BlockMask` or torch's BlockMask, with its meaning.
        kernel: name of the kernel, or "auto"; see `explain`.
        deterministic: makes the gradient bitwise repeatable, as torch.use_deterministic_algorithms does.
            The output always is; so are gradients of key and value in f16 and bf16 of standard precision.
        batch_invariant: makes the bits of a sequence's results, and of its gradients of query, key and value,
            depend on that sequence alone: not on the others in the batch, their number, lengths and order,
            nor on the capacity of a cache. Packed and dense calls agree, too. Implies `deterministic`.
        precision: how exact f16 and bf16 are. "standard": GPUs round what goes into products to 16 bits, as
            other attention kernels do. "strict": as exact as if computed in f32 and rounded at the end, at
            the speed of f32 in the backward pass. CPUs are always that exact. f32 is computed as f32 in both;
            "strict" does so where torch allows TF32, too.
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
    try:
        if (
            dropout_p == 0.0
            and window is None
            and alibi_slopes is None
            and sinks is None
            and logit_scale is None
            and block_mask is None
            and softcap == 0.0
            and alignment == "top_left"
            and kernel == "auto"
            and precision == "standard"
            and return_lse is False
            and batch_invariant is False
            and (deterministic is False or deterministic is True)
            and (out := _plain(query, key, value, attn_mask, is_causal, scale, enable_gqa, deterministic))
            is not None
        ):
            return out
    except (RuntimeError, TypeError, ValueError):  # something that cannot be compared; its name is told below
        pass
    check_tensors(query=query, key=key, value=value)
    check_optional_tensors(attn_mask=attn_mask)
    with_lse = flag_of("return_lse", return_lse)
    probability = number_of("dropout_p", dropout_p)
    arguments = (
        *(query, key, value, attn_mask, probability),
        *(flag_of("is_causal", is_causal), scale_of(scale), flag_of("enable_gqa", enable_gqa)),
        *options_of(query, probability, alignment, window, softcap, alibi_slopes, sinks),
        *NO_LENGTHS,
        *blocks_of(block_mask, query, key),
        *how_of(query, kernel, deterministic, precision, logit_scale, batch_invariant),
    )
    documents = _documents_of(block_mask, arguments)
    if documents is None:
        out, lse = _run(_ops.forward, arguments, DENSE_NAMES)
    else:
        out, lse = _run(_ops.forward, as_packed(arguments, documents), VARLEN_NAMES)
        out, lse = from_packed(out, lse, query.shape[0])
    return (out, lse) if with_lse else out


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
    leading dimensions broadcast, and attn_mask broadcasts to [..., Hq, Sq, Sk]. As torch documents it, an
    attn_mask and is_causal together are an error; `attention` takes both.

    >>> q, k, v = (torch.randn(3, 5, 8) for _ in range(3))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([3, 5, 8])
    """
    alignment: Alignment = "top_left"
    if attn_mask is not None and flag_of("is_causal", is_causal):
        reject("attn_mask", "None with is_causal", told(attn_mask))
    if type(attn_mask) is not Tensor and (corner := causal_bias(attn_mask)) is not None:
        alignment = corner
        attn_mask, is_causal = None, True
    elif isinstance(dropout_p, (float, int)) and dropout_p == 0.0:
        out = _plain(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    check_tensors(query=query, key=key, value=value)
    check_optional_tensors(attn_mask=attn_mask)
    shared = flag_of("enable_gqa", enable_gqa)
    query, key, value, attn_mask, batch = four_dims(query, key, value, attn_mask, shared)
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
    logit_scale: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Precision = "standard",
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
    check_tensors(value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_shared_heads(enable_gqa, query=query, key=key)
    with_lse = flag_of("return_lse", return_lse)
    probability, causal = number_of("dropout_p", dropout_p), flag_of("is_causal", is_causal)
    arguments = (
        *(query, key, value, None, probability, causal, scale_of(scale), True),
        *options_of(query, probability, alignment, window, softcap, alibi_slopes, sinks),
        *(None, None, cu_seqlens_q, cu_seqlens_k),
        *(whole_of("max_seqlen_q", max_seqlen_q), whole_of("max_seqlen_k", max_seqlen_k)),
        *NO_BLOCKS,
        *how_of(query, kernel, deterministic, precision, logit_scale, batch_invariant),
    )
    out, lse = _run(_ops.forward, arguments, VARLEN_NAMES)
    return (out, lse) if with_lse else out


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
    logit_scale: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Precision = "standard",
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
    check_tensors(v_cache=v_cache, cache_seqlens=cache_seqlens)
    check_optional_tensors(page_table=page_table)
    check_shared_heads(enable_gqa, query=query, k_cache=k_cache)
    with_lse = flag_of("return_lse", return_lse)
    probability, causal = number_of("dropout_p", dropout_p), flag_of("is_causal", is_causal)
    arguments = (
        *(query, k_cache, v_cache, None, probability, causal, scale_of(scale), True),
        *options_of(query, probability, alignment, window, softcap, alibi_slopes, sinks),
        *(cache_seqlens, page_table, None, None, 0, 0),
        *NO_BLOCKS,
        *how_of(query, kernel, deterministic, precision, logit_scale, batch_invariant),
    )
    out, lse = _run(_ops.forward, arguments, DECODE_NAMES)
    return (out, lse) if with_lse else out


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
        if not isinstance(given, (Sequence, Tensor)) or (isinstance(given, Tensor) and given.dim() == 0):
            raise TypeError(f"{name}: expected a sequence of Tensor, got {told(given)}")
        if not all(isinstance(x, Tensor) for x in given):
            raise TypeError(f"{name}: expected a sequence of Tensor, got {told(given)}")
        for x in given:
            if not x.is_floating_point():
                reject(name, "floating tensors", x.dtype)
            if x.device != given[0].device or x.is_nested or x.layout is not torch.strided:
                reject(name, f"dense tensors on {given[0].device}", f"{x.layout} on {x.device}")
    if len(outs) != len(lses) or len(outs) == 0:
        reject("lses", "as many tensors as outs, and at least one", f"{len(lses)} for {len(outs)}")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            reject("outs", f"parts of one shape, with lses {list(outs[0].shape[:-1])}",
                   f"out {list(out.shape)} and lse {list(lse.shape)}")  # fmt: skip
    if lses[0].device != outs[0].device:
        reject("lses", f"tensors on {outs[0].device}, as outs", lses[0].device)
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
    logit_scale: Tensor | None = None,
    block_mask: Any = None,
    kernel: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Precision = "standard",
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
    check_tensors(query=query, key=key, value=value)
    check_optional_tensors(attn_mask=attn_mask)
    flag_of("return_lse", return_lse)
    probability = number_of("dropout_p", dropout_p)
    arguments = (
        *(query, key, value, attn_mask, probability),
        *(flag_of("is_causal", is_causal), scale_of(scale), flag_of("enable_gqa", enable_gqa)),
        *options_of(query, probability, alignment, window, softcap, alibi_slopes, sinks, draws=False),
        *NO_LENGTHS,
        *blocks_of(block_mask, query, key),
        *how_of(query, kernel, deterministic, precision, logit_scale, batch_invariant),
    )
    documents = _documents_of(block_mask, arguments)
    if documents is None:
        return _run(_ops.explain, arguments, DENSE_NAMES)
    text = _run(_ops.explain, as_packed(arguments, documents), VARLEN_NAMES)
    return f"documents as packed sequences, without a block mask\n{text}"


def _documents_of(block_mask: Any, arguments: tuple[Any, ...]) -> Documents | None:
    """The documents of a mask, where attention can have them as packed sequences.

    A mask of another kind has to be kept, and dropout counts positions from the sequence's first.
    """
    documents = block_mask._documents if isinstance(block_mask, BlockMask) else None
    if documents is None or _transforms_active():
        return None
    given = _ops.named(arguments)
    if given["attn_mask"] is not None or given["dropout_p"] != 0.0:
        return None
    rows = (given["query"], given["key"], given["value"])
    return documents if documents.fit(*rows, given["alibi_slopes"], given["enable_gqa"]) else None


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
        if _is_tracing() or _transforms_active() or forward_ad._current_level >= 0:
            return None
        options, training = _plain_calls[is_causal, scale, enable_gqa, query.is_cuda and tf32_allowed()]
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
    except (RuntimeError, AttributeError, TypeError, ValueError, OverflowError, AssertionError):
        return None
