"""Attention with a pair bias, as in the triangle attention of protein models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import masks
from tilewise._arguments import Precision, check_optional_tensors, check_tensors
from tilewise._errors import check_dense, reject
from tilewise._scalars import flag_of
from tilewise.attention import attention


def triangle_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    kernel: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
    precision: Precision = "standard",
) -> Any:
    """Attention along the rows of a pair representation, with a bias that all rows share.

    Nothing is expanded: all N rows read the same bias, and its gradient is their sum, in f32 until it is
    rounded to the bias's type. AlphaFold 3, Boltz and OpenFold call this with N = S, and once more with the
    pair representation transposed.

    Args:
        query: [B, N, H, Sq, D] in f32, f16 or bf16, any strides.
        key: [B, N, H, Sk, D].
        value: [B, N, H, Sk, Dv].
        bias: [B, 1, H, Sq, Sk] in the type of query or in f32; added to the score. Has a gradient.
        mask: bool [B, N, 1, 1, Sk]: true where a row's queries see a key.
        scale: factor of the score, 1/√D by default.
        kernel: name of the kernel, or "auto"; see `explain`.
        deterministic: makes the gradient bitwise repeatable.
        return_lse: also returns the logarithm of the softmax's denominator.
        precision: how exact f16 and bf16 are, as in `attention`.

    Returns:
        out [B, N, H, Sq, Dv], or (out, lse) with lse [B, N, H, Sq] in f32. A query that sees no key has out 0
        and lse -inf.

    >>> q, k, v = torch.randn(3, 1, 6, 2, 6, 8)
    >>> bias, mask = torch.randn(1, 1, 2, 6, 6), torch.rand(1, 6, 1, 1, 6) < 0.8
    >>> score = q @ k.transpose(-2, -1) / 8**0.5 + bias
    >>> expected = torch.softmax(score.masked_fill(~mask, -1e9), -1) @ v
    >>> torch.allclose(triangle_attention(q, k, v, bias, mask), expected, atol=1e-5)
    True
    """
    check_tensors(query=query, key=key, value=value)
    check_optional_tensors(bias=bias, mask=mask)
    with_lse = flag_of("return_lse", return_lse)
    _check_shapes(query, key, value, bias, mask)
    given = [query, key, value, *(x for x in (bias, mask) if x is not None)]
    options: dict[str, Any] = {"kernel": kernel, "deterministic": deterministic, "return_lse": True}
    options["precision"] = precision
    results = []
    # The entries of a batch have biases of their own, so each is a call of N rows.
    for q, k, v, *more in zip(*(_entries(x) for x in given), strict=True):
        own_bias = more[0] if bias is not None else None
        own_mask = masks.padding(more[-1][:, 0, 0], q.shape[2]) if mask is not None else None
        results.append(attention(q, k, v, own_bias, scale=scale, block_mask=own_mask, **options))
    out, lse = (_joined(parts, *query.shape[:2]) for parts in zip(*results, strict=True))
    return (out, lse) if with_lse else out


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.dim() != 5:
            reject(name, "rank 5 [B, N, H, length, dim]", list(x.shape))
        if x.shape[:3] != query.shape[:3]:
            reject(name, f"the B, N and H of query, {list(query.shape[:3])}", list(x.shape))
    batch, rows, heads, length_q, _ = query.shape
    length_k = key.shape[3]
    for name, given, shape in (
        ("bias", bias, (batch, 1, heads, length_q, length_k)),
        ("mask", mask, (batch, rows, 1, 1, length_k)),
    ):
        if given is None:
            continue
        check_dense(name, given)
        if tuple(given.shape) != shape:
            reject(name, str(list(shape)), list(given.shape))
    if bias is not None and not bias.is_floating_point():
        reject("bias", "a floating type", bias.dtype)
    if mask is not None and mask.dtype != torch.bool:
        reject("mask", "torch.bool", mask.dtype)


def _entries(x: Tensor) -> tuple[Tensor, ...]:
    """Those of a batch. Of one entry it is a view whose gradient is a view, too."""
    return x.unbind(0) if x.shape[0] > 1 else (x.flatten(0, 1),)


def _joined(parts: tuple[Tensor, ...], batch: int, rows: int) -> Tensor:
    return torch.stack(parts) if batch > 1 else parts[0].unflatten(0, (batch, rows))
