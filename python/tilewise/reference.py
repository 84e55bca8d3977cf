"""The contract in plain PyTorch: float64, the whole score matrix, one line for each rule.

It shares no code with the kernels. Gradients are autograd's. For tests, and for reading.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewise._seeds import draw_seed
from tilewise.block_mask import block_mask_of


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
    alignment: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    logit_scale: Tensor | None = None,
    block_mask: Any = None,
    kernel: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: str = "standard",
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """What `tilewise.attention` means; takes the same arguments, and the same seed for dropout.

    Shapes: query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv] and
    lse [B, Hq, Sq], both in `dtype`, the type it computes in. `kernel`, `deterministic`,
    `batch_invariant` and `precision` change nothing.

    >>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    >>> torch.allclose(attention(q, k, v), expected)
    True
    """
    (_, heads, length_q, dim), length_k = query.shape, key.shape[2]
    group = heads // key.shape[1] if key.shape[1] else 1
    q = query.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (key, value))
    i = torch.arange(length_q, device=q.device)[:, None]
    j = torch.arange(length_k, device=q.device)

    score = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(dim) if scale is None else scale)
    if logit_scale is not None:
        score = score * logit_scale.to(dtype)[:, None, None]
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        score = score - alibi_slopes.to(dtype)[..., None, None] * (i + length_k - length_q - j).abs()
    hidden = _outside_band(i, j, length_k - length_q, is_causal, alignment, window)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        score = score + attn_mask.to(dtype)
    if block_mask is not None:
        hidden = hidden | ~block_mask_of(block_mask, length_q, length_k).to_dense(length_q, length_k)
    score = score.masked_fill(hidden, -torch.inf)

    sink = None if sinks is None else sinks.to(dtype)[:, None]  # [Hq, 1]
    weight, lse = _softmax(score, sink)
    if dropout_p > 0:
        weight = weight * _dropout_factor(dropout_p, draw_seed(q.device), tuple(score.shape)).to(q)
    out = weight @ v
    return (out, lse) if return_lse else out


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *arguments: Any,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """What `tilewise.attention_varlen` means, without dropout: `attention` on each sequence by itself.

    Shapes: query [total_q, Hq, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv]; out [total_q, Hq, Dv] and
    lse [Hq, total_q].

    >>> x = torch.randn(5, 2, 4)
    >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> attention_varlen(x, x, x, lengths, lengths, 3, 3).shape
    torch.Size([5, 2, 4])
    """
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    dtype = options.get("dtype", torch.float64)
    slopes = options.pop("alibi_slopes", None)
    outs, lses = [], []
    for n in range(len(ends_q) - 1):
        q = query[ends_q[n] : ends_q[n + 1]].transpose(0, 1)[None]
        k, v = (x[ends_k[n] : ends_k[n + 1]].transpose(0, 1)[None] for x in (key, value))
        own = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        out, lse = attention(q, k, v, None, *arguments, alibi_slopes=own, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    unused = query.shape[0] - ends_q[-1]
    outs.append(value.new_zeros((unused, query.shape[1], value.shape[2]), dtype=dtype))
    lses.append(value.new_full((query.shape[1], unused), -torch.inf, dtype=dtype))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    *arguments: Any,
    return_lse: bool = False,
    alignment: str = "bottom_right",
    **options: Any,
) -> Any:
    """What `tilewise.attention_decode` means, without dropout: `attention` on the keys in use.

    Shapes: query [B, Hq, Sq, D]; caches [B, Hkv, S, D], or [pages, Hkv, page, D] with page_table
    [B, max_pages]; out [B, Hq, Sq, Dv] and lse [B, Hq, Sq].

    >>> q, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8)
    >>> attention_decode(q, cache, cache, torch.tensor([3, 16], dtype=torch.int32)).shape
    torch.Size([2, 4, 1, 8])
    """
    slopes = options.pop("alibi_slopes", None)
    outs, lses = [], []
    for b, length in enumerate(cache_seqlens.tolist()):  # at least one
        if page_table is None:
            k, v = k_cache[b, :, :length], v_cache[b, :, :length]
        else:
            pages = page_table[b, : -(-length // k_cache.shape[2])].long()
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k_cache, v_cache))
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        out, lse = attention(
            query[b, None], k[None], v[None], None, *arguments,
            alibi_slopes=own, alignment=alignment, return_lse=True, **options,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    out, lse = torch.stack(outs), torch.stack(lses)
    return (out, lse) if return_lse else out


def _outside_band(i: Tensor, j: Tensor, offset: int, is_causal: bool, alignment: str, window: Any) -> Tensor:
    """[Sq, Sk]: what causal and window hide."""
    position = i + offset if alignment == "bottom_right" else i
    left, right = window or (None, None)
    hidden = (j != j) & (i != i)
    if is_causal:
        hidden = hidden | (j > position)
    if left is not None:
        hidden = hidden | (j < position - left)
    if right is not None:
        hidden = hidden | (j > position + right)
    return hidden


def _softmax(score: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [..., Sq, Sk] and lse [..., Sq]. Rows that see nothing have weights 0 and lse -inf, and neither
    they nor their gradients become NaN."""
    shift = score.detach().amax(-1) if score.shape[-1] else score.new_full(score.shape[:-1], -torch.inf)
    if sink is not None:
        shift = torch.maximum(shift, sink.detach())
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    unnormalised = torch.exp(score - shift[..., None])
    total = unnormalised.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    safe = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -torch.inf, torch.log(safe) + shift)
    return unnormalised / safe[..., None], lse


def _dropout_factor(p: float, seed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[B, Hq, Sq, Sk]: 0 where a weight is dropped, else 1/(1 - p), with p rounded to 16 bits. All are
    dropped where p is 1.

    Philox 4x32-10 with key (seed) and counter (j/8, i, b·Hq + h, offset). Of eight keys, the first four have
    the low halves of its four words, the others the high halves. The weight stays where these 16 bits are at
    least p·2^16.
    """
    batch, heads, length_q, length_k = shape
    p = float(torch.tensor(p, dtype=torch.float32))  # the kernels are given it in f32
    low = 0xFFFFFFFF
    word, offset = (int(x) % 2**64 for x in seed)
    key = [word & low, (word >> 32) ^ (offset >> 32)]
    grid = torch.meshgrid(
        torch.arange(batch * heads),
        torch.arange(length_q),
        torch.arange(-(-length_k // 8)),
        indexing="ij",
    )
    counter = [grid[2], grid[1], grid[0], torch.full_like(grid[0], offset & low)]
    for _ in range(10):
        products = (0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2])  # wraps at 64 bits, which is exact
        high = [(x >> 32) & low for x in products]
        counter = [
            high[1] ^ counter[1] ^ key[0],
            products[1] & low,
            high[0] ^ counter[3] ^ key[1],
            products[0] & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    halves = [*(word & 0xFFFF for word in counter), *(word >> 16 for word in counter)]
    drawn = torch.stack(halves, dim=-1).flatten(-2)[..., :length_k].view(shape)
    threshold = min(int(p * 2**16 + 0.5), 0xFFFF)
    return (drawn >= threshold).double() * (2**16 / (2**16 - threshold) if p < 1 else 0)
