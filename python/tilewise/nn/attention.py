"""Attention with its projections."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise._arguments import (
    Alignment,
    Precision,
    Window,
    check_optional_tensors,
    check_tensors,
    window_of,
)
from tilewise._errors import reject
from tilewise._scalars import at_least, flag_of, number_of, text_of, whole_of
from tilewise._triton import NAMES as KERNELS
from tilewise.attention import attention
from tilewise.nn.joint import joint, lay_together

__all__ = ["Attention", "MultiheadAttention"]


class Attention(nn.Module):
    """Projections around `tilewise.attention`: self-attention, or cross-attention to a context.

    Args:
        embed_dim: E, the width of the input and of the output.
        num_heads: Hq, heads of queries.
        num_kv_heads: Hkv, heads of keys and values, a divisor of `num_heads` and equal to it by default.
        head_dim: D, `embed_dim` // `num_heads` by default.
        bias: whether the projections of query, key and value have one.
        out_bias: whether the output's projection has one, as `bias` by default.
        is_causal: a query sees keys up to its own position.
        dropout: probability of dropping a weight in training.
        context_dim: width of the context, `embed_dim` by default.
        scale, alignment, window, softcap, kernel, precision: as in `tilewise.attention`.
        sinks: whether each head learns a logit that joins its denominator alone.

    >>> layer = Attention(embed_dim=64, num_heads=8, num_kv_heads=2, is_causal=True)
    >>> layer(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])
    >>> cross = Attention(embed_dim=64, num_heads=4, context_dim=32)
    >>> cross(torch.randn(3, 10, 64), context=torch.randn(3, 7, 32)).shape
    torch.Size([3, 10, 64])
    """

    sinks: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        is_causal: bool = False,
        dropout: float = 0.0,
        *,
        out_bias: bool | None = None,
        context_dim: int | None = None,
        scale: float | None = None,
        alignment: Alignment = "top_left",
        window: Window | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        kernel: str = "auto",
        precision: Precision = "standard",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        context_dim = embed_dim if context_dim is None else context_dim
        at_least(1, embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        at_least(1, context_dim=context_dim)
        if num_heads % num_kv_heads:
            reject("num_kv_heads", f"a divisor of num_heads {num_heads}", num_kv_heads)
        if head_dim is None and embed_dim % num_heads:
            reject("embed_dim", f"a multiple of num_heads {num_heads}, or a head_dim", embed_dim)
        if head_dim is not None and not 1 <= whole_of("head_dim", head_dim) <= 4096:
            reject("head_dim", "1 to 4096", head_dim)
        if not 0.0 <= number_of("dropout", dropout) <= 1.0:
            reject("dropout", "a number from 0 to 1", dropout)
        flags = {
            "bias": bias,
            "is_causal": is_causal,
            "sinks": sinks,
            "out_bias": bias if out_bias is None else out_bias,
        }
        for name, given in flags.items():
            flag_of(name, given)
        if scale is not None and not math.isfinite(number_of("scale", scale)):
            reject("scale", "a finite number", scale)
        if not 0.0 <= number_of("softcap", softcap) < math.inf:
            reject("softcap", "a finite number, 0 or above", softcap)
        for side, extent in enumerate(window_of(window)):
            if extent is not None and extent < 0:
                reject(f"window[{side}]", "0 or above, or None", extent)
        text_of("alignment", alignment, "top_left", "bottom_right")
        text_of("kernel", kernel, "auto", *KERNELS)
        text_of("precision", precision, "standard", "strict")
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.is_causal, self.dropout = is_causal, dropout
        self.scale, self.alignment, self.window = scale, alignment, window
        self.softcap, self.kernel, self.precision = softcap, kernel, precision

        where = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **where)
        self.k_proj = nn.Linear(context_dim, num_kv_heads * self.head_dim, bias, **where)
        self.v_proj = nn.Linear(context_dim, num_kv_heads * self.head_dim, bias, **where)
        self.out_proj = nn.Linear(
            num_heads * self.head_dim, embed_dim, bias if out_bias is None else out_bias, **where
        )
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device)) if sinks else None
        lay_together(self.q_proj, self.k_proj, self.v_proj)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        """Moved or cast one by one, projections would lie apart."""
        super()._apply(fn, recurse)
        if recurse and joint(*(x.weight for x in (self.q_proj, self.k_proj, self.v_proj))) is None:
            lay_together(self.q_proj, self.k_proj, self.v_proj)
        return self

    def forward(self, x: Tensor, context: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        """x [B, Sq, E] attends to context [B, Sk, context_dim], or to itself.

        attn_mask broadcasts to [B, Hq, Sq, Sk]: boolean, true where a query attends, or floating and added.
        """
        context = x if context is None else context
        check_tensors(x=x, context=context)
        for name, tensor, width in (("x", x, self.q_proj), ("context", context, self.k_proj)):
            if tensor.dim() != 3 or tensor.shape[-1] != width.in_features:
                reject(name, f"[B, S, {width.in_features}]", list(tensor.shape))
        query = _split(self.q_proj(x), self.num_heads)
        key, value = (_split(proj(context), self.num_kv_heads) for proj in (self.k_proj, self.v_proj))
        out = attention(
            *(query, key, value, attn_mask),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=True,
            alignment=self.alignment,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            kernel=self.kernel,
            precision=self.precision,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        options = {
            "is_causal": (self.is_causal, False),
            "dropout": (self.dropout, 0.0),
            "scale": (self.scale, None),
            "alignment": (self.alignment, "top_left"),
            "window": (self.window, None),
            "softcap": (self.softcap, 0.0),
            "kernel": (self.kernel, "auto"),
            "precision": (self.precision, "standard"),
        }
        changed = [f"{name}={value}" for name, (value, default) in options.items() if value != default]
        shape = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return ", ".join([shape, *changed])


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on Tilewise: its constructor, parameters and forward signature.

    State dicts fit both ways. What differs:

    - A query that sees no key gives zeros before the output's projection, never NaN.
    - Weights are returned as they are before dropout. They are exact, exp(score - lse) of the attention that
      was computed, in f32 or wider and then rounded to the query's type; asking for them costs the memory
      they take for each head, [N, H, L, S], averaged or not. `need_weights=False` costs nothing.
    - Where `is_causal` is given with `attn_mask`, it is believed and the mask is not read, unless the layer
      appends keys of its own (`add_bias_kv`, `add_zero_attn`), which every query sees.

    >>> theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    >>> ours = MultiheadAttention(32, 4, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 10, 32)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's own; N is the batch, L and S the lengths of query and key, H the heads.

        Args:
            query: [L, N, embed_dim], [N, L, embed_dim] with `batch_first`, or [L, embed_dim].
            key: likewise [S, N, kdim].
            value: likewise [S, N, vdim].
            key_padding_mask: [N, S] or [S]; boolean, true where a key is ignored, or floating and added.
            need_weights: whether the weights are returned too.
            attn_mask: [L, S] or [N·H, L, S]; boolean, true where a query must not attend, or floating and
                added.
            average_attn_weights: whether the weights are averaged over heads.
            is_causal: says that `attn_mask` is the causal mask.

        Returns:
            out, shaped as query, and the weights: None, [N, L, S] or, not averaged, [N, H, L, S]; without N
            where query has none.
        """
        check_tensors(query=query, key=key, value=value)
        check_optional_tensors(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        with_weights = flag_of("need_weights", need_weights)
        averaged = flag_of("average_attn_weights", average_attn_weights)
        is_causal = flag_of("is_causal", is_causal)
        appended = (self.bias_k is not None) + self.add_zero_attn
        batched = not query.is_nested and query.dim() == 3
        # Projections are made in the layout that came, where they need no copy; heads are views of it.
        order = (0, 2, 1, 3) if batched and self.batch_first else (1, 2, 0, 3)
        batch, length_q, length_k = self._check_rows(query, key, value, batched)
        shape = (batch, self.num_heads, length_q, length_k)
        mask, causal = _merged_mask(shape, appended, key_padding_mask, attn_mask, is_causal, batched)
        projected = self._project(query, key, value)
        q, k, v = (x if batched else x.unsqueeze(1) for x in projected)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).permute(order) for x in (q, k, v))
        k, v = self._append_keys(k, self.bias_k), self._append_keys(v, self.bias_v)

        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask, dropout, causal, return_lse=with_weights)
        weights = None
        if with_weights:
            out, lse = out
            weights = _weights(q, k, mask, causal, lse)
            weights = weights.mean(1) if averaged else weights
            weights = weights if batched else weights.squeeze(0)
        out = self.out_proj(out.permute((0, 2, 1, 3) if order[0] == 0 else (2, 0, 1, 3)).flatten(2))
        return out if batched else out.squeeze(1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _append_keys(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Keys or values [N, H, S, D] with those the layer itself adds."""
        if bias is not None:
            own = bias.view(self.num_heads, 1, self.head_dim).to(rows.dtype)
            rows = torch.cat([rows, own.expand(rows.shape[0], -1, -1, -1)], dim=2)
        return F.pad(rows, (0, 0, 0, 1)) if self.add_zero_attn else rows

    def _check_rows(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> tuple[int, int, int]:
        """(N, L, S)"""
        layout = ("[N, S, {}]" if self.batch_first else "[S, N, {}]") if batched else "[S, {}]"
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if x.is_nested:
                reject(name, "a dense tensor", "a nested one")
            if x.dim() != (3 if batched else 2) or x.shape[-1] != width:
                reject(name, layout.format(width), list(x.shape))
        if value.shape[:-1] != key.shape[:-1]:
            reject("value", f"{[*key.shape[:-1], self.vdim]}, as long as key", list(value.shape))
        if not batched:
            return 1, query.shape[0], key.shape[0]
        along = 0 if self.batch_first else 1
        if query.shape[along] != key.shape[along]:
            reject("key", f"a batch of {query.shape[along]} as in query", key.shape[along])
        return query.shape[along], query.shape[1 - along], key.shape[1 - along]


def _split(rows: Tensor, heads: int) -> Tensor:
    """[B, S, H·D] as [B, H, S, D]."""
    return rows.unflatten(-1, (heads, rows.shape[-1] // heads)).transpose(1, 2)


def _merged_mask(
    shape: tuple[int, int, int, int],
    appended: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    batched: bool,
) -> tuple[Tensor | None, bool]:
    """torch's two masks, true where hidden, as one that `attention` takes, and whether it adds causality."""
    batch, heads, length_q, length_k = shape
    parts = []
    if key_padding_mask is not None:
        _check_mask("key_padding_mask", key_padding_mask, (batch, length_k) if batched else (length_k,))
        parts.append(key_padding_mask.view(batch, 1, 1, length_k))
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask, (length_q, length_k), (batch * heads, length_q, length_k))
    elif is_causal:
        reject("attn_mask", "the causal mask with is_causal", None)
    causal = is_causal and appended == 0
    if attn_mask is not None and not causal:
        parts.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, heads)))

    parts = [~x if x.dtype == torch.bool else x for x in parts]
    if appended:
        parts = [F.pad(x, (0, appended), value=x.dtype == torch.bool) for x in parts]
    if len(parts) < 2:
        return (parts[0] if parts else None), causal
    first, second = parts
    if first.dtype == second.dtype == torch.bool:
        return first & second, causal
    if first.dtype != torch.bool and second.dtype != torch.bool:
        return first + second, causal
    added, visible = (second, first) if first.dtype == torch.bool else (first, second)
    return torch.where(visible, added, -torch.inf), causal


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        reject(name, "a boolean or floating tensor", mask.dtype)
    if tuple(mask.shape) not in shapes:
        reject(name, " or ".join(str(list(shape)) for shape in shapes), list(mask.shape))


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, lse: Tensor) -> Tensor:
    """softmax(score) [N, H, L, S] in query's type, from the statistics of the attention that was computed."""
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        score = query.to(wide) @ key.to(wide).transpose(-2, -1) * query.shape[-1] ** -0.5
        if causal:
            future = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
            score = score.masked_fill(future, -torch.inf)
        if mask is not None and mask.dtype == torch.bool:
            score = score.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            score = score + mask
        shift = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)  # where all is hidden: exp(-inf) = 0
        return torch.exp(score - shift).to(query.dtype)
