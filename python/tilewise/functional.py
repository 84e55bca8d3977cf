"""The operations of a transformer layer around attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise import _layer_ops as ops
from tilewise._arguments import check_optional_tensors, check_tensors
from tilewise._errors import check_dense, reject, translated
from tilewise._ops import autocast_dtype
from tilewise._scalars import at_least, flag_of, number_of, text_of, whole_of

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

# Python's names for arguments that the library or the operators know by others.
_NAMES = {"kernel_name": "kernel", "epsilon": "eps"}
_LINEAR_NAMES = _NAMES | {"a": "input", "b": "weight"}
_NORM_NAMES = _NAMES | {"x": "input"}
_ROPE_NAMES = _NAMES | {"q": "query", "k": "key", "v": "value", "output q": "query", "output k": "key"}


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
    residual: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """A linear layer and what follows it, in one pass: f(input·weightᵀ + bias) + residual.

    With a gate it is f(input·gateᵀ + gate_bias) ⊙ (input·weightᵀ + bias) + residual, and neither product is
    stored alone.

    Args:
        input: [..., K] in f32, f16 or bf16 (f64 through the reference kernel).
        weight: [N, K], as in torch.nn.Linear; a transposed view is read where it lies.
        bias: [N].
        activation: f: "none", "relu", "gelu" (the exact one), "gelu_tanh" or "silu".
        gate: [N, K], apart from weight or another view of the same tensor.
        gate_bias: [N].
        residual: [..., N], added at the end.
        kernel: name of the kernel, or "auto".

    Returns:
        [..., N]. Differentiable; what came before the activation is computed anew for that.

    >>> x, w, b = torch.randn(2, 5, 8), torch.randn(3, 8), torch.randn(3)
    >>> expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))
    >>> torch.allclose(linear(x, w, b, activation="gelu"), expected, atol=1e-5)
    True
    """
    check_tensors(input=input, weight=weight)
    check_optional_tensors(bias=bias, gate=gate, gate_bias=gate_bias, residual=residual)
    _check_words(activation, kernel)
    input, weight, gate, residual = _autocast(input, weight, gate, residual)
    rows, shape = _rows("input", input)
    addend = _residual_rows(residual, (*shape, weight.shape[0]) if weight.dim() == 2 else shape)
    arguments = (rows, weight, bias, gate, gate_bias, addend, activation, kernel, _tf32(input))
    out = _run(ops.gemm, arguments, _LINEAR_NAMES)
    return out if input.dim() == 2 else out.view(*shape, out.shape[-1])


def ffn(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate: Tensor | None = None,
    up_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation = "gelu",
    max_intermediate_bytes: int = 0,
    keep_products: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """A feed-forward network: h·downᵀ + down_bias + residual with h = f(x·upᵀ + up_bias).

    With a gate, h = f(x·gateᵀ + gate_bias) ⊙ (x·upᵀ + up_bias): SwiGLU with "silu", GEGLU with "gelu".

    Args:
        x: [..., E].
        up: [F, E], `gate` likewise.
        down: [O, F].
        up_bias, gate_bias: [F].
        down_bias: [O].
        residual: [..., O], added at the end.
        activation: f; see `linear`.
        max_intermediate_bytes: bound on the memory of h, which is worked on in chunks; 0: 512 MiB of h.
        keep_products: whether x·upᵀ and x·gateᵀ are kept for a backward, [..., F] each, which then need not
            compute them anew: one product of five, or two of eight with a gate. Without a gradient nothing
            is kept.
        kernel: name of the kernel, or "auto".

    Returns:
        [..., O]. Differentiable; h is computed anew for that.

    >>> x, up, down = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randn(8, 32)
    >>> expected = torch.nn.functional.gelu(x @ up.T) @ down.T
    >>> torch.allclose(ffn(x, up, down), expected, atol=1e-4)
    True
    """
    check_tensors(x=x, up=up, down=down)
    check_optional_tensors(gate=gate, up_bias=up_bias, gate_bias=gate_bias, down_bias=down_bias)
    check_optional_tensors(residual=residual)
    _check_words(activation, kernel)
    keeps = flag_of("keep_products", keep_products)
    x, up, down, gate, residual = _autocast(x, up, down, gate, residual)
    rows, shape = _rows("x", x)
    addend = _residual_rows(residual, (*shape, down.shape[0]) if down.dim() == 2 else shape)
    biases = (up_bias, gate_bias, down_bias)
    options = (activation, whole_of("max_intermediate_bytes", max_intermediate_bytes), kernel, _tf32(x))
    arguments = (rows, up, down, gate, *biases, addend, *options)
    recorded = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments)
    if keeps and recorded:
        out = _run(ops.ffn_forward_kept, arguments, _NAMES)[0]
    else:
        out = _run(ops.ffn_forward, arguments, _NAMES)
    return out if x.dim() == 2 else out.view(*shape, out.shape[-1])


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    kernel: str = "auto",
) -> Any:
    """input / √(mean(input²) + eps) · weight, over the last dimension.

    Args:
        input: [..., D].
        weight: [D], in the type of input or f32.
        residual: shaped as input, added to it before.
        kernel: name of the kernel, or "auto".

    Returns:
        out, or (out, input + residual) where there is a residual. Differentiable.

    >>> x, w = torch.randn(2, 5, 8), torch.randn(8)
    >>> expected = torch.nn.functional.rms_norm(x, (8,), w, eps=1e-6)
    >>> torch.allclose(rms_norm(x, w), expected, atol=1e-6)
    True
    """
    return _norm(input, weight, None, eps, residual, kernel, layer=False)


def layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    kernel: str = "auto",
) -> Any:
    """(input - mean) / √(variance + eps) · weight + bias, over the last dimension. Else as `rms_norm`.

    >>> x, y, w = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)
    >>> out, summed = layer_norm(x, w, residual=y)
    >>> torch.allclose(out, torch.nn.functional.layer_norm(x + y, (8,), w), atol=1e-5)
    True
    """
    return _norm(input, weight, bias, eps, residual, kernel, layer=True)


def _norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    kernel: str,
    *,
    layer: bool,
) -> Any:
    check_tensors(input=input)
    check_optional_tensors(weight=weight, bias=bias, residual=residual)
    text_of("kernel", kernel)
    rows, _ = _rows("input", input)
    addend = _residual_rows(residual, tuple(input.shape))
    arguments = (rows, addend, weight, bias, number_of("eps", eps), layer, kernel)
    out, summed, _, _ = _run(ops.norm_forward, arguments, _NORM_NAMES)
    return out.view(input.shape) if residual is None else (out.view(input.shape), summed.view(input.shape))


def rope_tables(
    positions: int,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    inverse_frequencies: Tensor | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), f32 [positions, rotary_dim/2]: the angles `apply_rope` turns by at each position.

    `inverse_frequencies` [rotary_dim/2] takes the place of base^(-2n/rotary_dim).

    >>> cos, sin = rope_tables(16, 8)
    >>> cos.shape
    torch.Size([16, 4])
    """
    at_least(0, positions=positions)
    if whole_of("rotary_dim", rotary_dim) < 0 or rotary_dim % 2:
        reject("rotary_dim", "an even number, 0 or above", rotary_dim)
    check_optional_tensors(inverse_frequencies=inverse_frequencies)
    if inverse_frequencies is None:
        root = number_of("base", base)
        if not (0.0 < root < math.inf):
            reject("base", "a finite number above 0", root)
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
        inverse_frequencies = 1.0 / root ** (steps / max(rotary_dim, 1))
    elif tuple(inverse_frequencies.shape) != (rotary_dim // 2,):
        reject("inverse_frequencies", str([rotary_dim // 2]), list(inverse_frequencies.shape))
    rows = torch.arange(positions, dtype=torch.float32, device=device)
    angles = torch.outer(rows, inverse_frequencies.to(device=rows.device, dtype=torch.float32))
    return angles.cos(), angles.sin()


def apply_rope(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    kernel: str = "auto",
) -> Any:
    """Rotary embedding of query and key in one pass.

    Args:
        query: [B, Hq, S, D], any strides.
        key: [B, Hkv, S, D], or None.
        cos, sin: tables [positions, R/2], or the angles of each token, [B or 1, S, R/2], in f32 or query's
            type. The first R elements of a head are turned, the rest is left.
        positions: int32 or int64 [B or 1, S] or [S]: rows of the tables; token s takes row s by default.
        interleaved: pairs are elements 2n and 2n + 1 (GPT-J); else n and n + R/2 (Llama in Hugging Face).
        kernel: name of the kernel, or "auto".

    Returns:
        (query, key) turned, or query where key is None. Differentiable.

    >>> q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 1, 16, 8)
    >>> turned_q, turned_k = apply_rope(q, k, *rope_tables(16, 8))
    >>> torch.allclose(turned_q.norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    True
    """
    check_tensors(query=query, cos=cos, sin=sin)
    check_optional_tensors(key=key, positions=positions)
    flag, name = flag_of("interleaved", interleaved), text_of("kernel", kernel)
    if positions is not None and positions.dim() == 1:
        positions = positions.unsqueeze(0)
    arguments = (query, key, cos, sin, positions, flag, False, name)
    results = _run(ops.rope, arguments, _ROPE_NAMES)
    return results[0] if key is None else tuple(results)


def rope_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    cache_starts: Tensor | None = None,
    cache_ends: Tensor | None = None,
    page_table: Tensor | None = None,
    interleaved: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Turns query and key, and writes the turned key and the value into a cache, in one pass.

    Args:
        query, key, cos, sin, positions, interleaved: as in `apply_rope`.
        value: [B, Hkv, S, Dv].
        k_cache: [B, Hkv, C, D]; or, with `page_table`, [pages, Hkv, page, D]; in any strides.
        v_cache: likewise with Dv.
        cache_starts: int32 [B]: place in the cache of each sequence's first token, 0 by default.
        cache_ends: int32 [B], in place of `cache_starts`: how many tokens of each sequence the cache has with
            these. Without `positions`, those of a table are then places in the cache.
        page_table: int32 [B, max_pages]: where the tokens n·page up to (n + 1)·page of a sequence are.

    Returns:
        query, turned. There is no gradient: what the cache held before is overwritten.

    >>> q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8)
    >>> k_cache, v_cache = torch.zeros(2, 1, 32, 8), torch.zeros(2, 1, 32, 8)
    >>> starts = torch.tensor([3, 7], dtype=torch.int32)
    >>> tables = rope_tables(32, 8)
    >>> turned = rope_into_cache(q, k, v, k_cache, v_cache, *tables, starts[:, None], cache_starts=starts)
    >>> torch.equal(v_cache[1, 0, 7], v[1, 0, 0])
    True
    """
    check_tensors(query=query, key=key, value=value, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin)
    check_optional_tensors(positions=positions, cache_starts=cache_starts, cache_ends=cache_ends)
    check_optional_tensors(page_table=page_table)
    flag, name = flag_of("interleaved", interleaved), text_of("kernel", kernel)
    if positions is not None and positions.dim() == 1:
        positions = positions.unsqueeze(0)
    caches = (k_cache, v_cache)
    tables = (cos, sin, positions, cache_starts, page_table)
    arguments = (query, key, value, *caches, *tables, flag, name, cache_ends)
    with torch.no_grad():
        return _run(ops.rope_into_cache, arguments, _ROPE_NAMES)


# What all of them share


def _run(operator: torch._ops.OpOverload, arguments: tuple[Any, ...], names: Mapping[str, str]) -> Any:
    try:
        return ops.call(operator, *arguments)
    except (RuntimeError, AttributeError) as error:
        given = (argument.name for argument in operator._schema.arguments)
        raise translated(error, dict(zip(given, arguments, strict=False)), names) from None


def _check_words(activation: Any, kernel: Any) -> None:
    text_of("activation", activation)
    text_of("kernel", kernel)


def _rows(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """[..., D] as [M, D], and the dimensions before the last."""
    if tensor.dim() < 1:
        reject(name, "at least one dimension", "none")
    shape = tuple(tensor.shape[:-1])
    if tensor.dim() == 2:
        return tensor, shape
    try:
        return tensor.reshape(math.prod(shape), tensor.shape[-1]), shape
    except RuntimeError:
        check_dense(name, tensor)
        raise


def _residual_rows(residual: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if residual is None:
        return None
    if tuple(residual.shape) != shape:
        reject("residual", str(list(shape)), list(residual.shape))
    return _rows("residual", residual)[0]


def _tf32(tensor: Tensor) -> bool:
    cuda = tensor.is_cuda and tensor.dtype == torch.float32
    return cuda and torch.backends.cuda.matmul.allow_tf32


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the type that autocast asks for, as PyTorch's own products take them."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
