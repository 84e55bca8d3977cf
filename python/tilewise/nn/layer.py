"""The whole transformer layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import _ops
from tilewise._arguments import check_optional_tensors, check_tensors
from tilewise._errors import reject
from tilewise._scalars import at_least
from tilewise.attention import attention, attention_decode
from tilewise.functional import linear, rope_into_cache
from tilewise.nn.attention import Attention
from tilewise.nn.blocks import FeedForward, GatedFeedForward, LayerNorm, RMSNorm, RotaryEmbedding
from tilewise.nn.configs import LayerConfig, config_of
from tilewise.nn.joint import joint


@dataclass
class KVCache:
    """Keys and values of the tokens a layer has seen.

    `k` and `v` are [B, Hkv, C, D], or, with `page_table` int32 [B, max_pages], [pages, Hkv, page, D].
    `lengths` int32 [B] counts the tokens of each sequence; the layer moves it on, in place.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None = None


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each with its norm and its residual.

    The residual adds are part of the products before them. There is no dropout.

    Args:
        config: a `LayerConfig`, or the name of one in `CONFIGS`: "vit-b/16", "bert-base", "llama-2-7b",
            "llama-2-13b", "llama-2-70b", "llama-3-8b".
        rotary: the rotary embedding, where layers share one; else the layer makes its own.
        keep_products: whether a backward finds what stood before the network's activation, or computes it
            anew; see `tilewise.ffn`.
        changes: fields of the configuration to be replaced.

    >>> small = {"embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}
    >>> layer = TransformerLayer("llama-2-7b", **small)
    >>> x = torch.randn(2, 10, 64)
    >>> out = layer(x)
    >>> cache = layer.make_cache(batch=2, capacity=16)  # the same, a few tokens at a time
    >>> parts = [layer(x[:, :7], cache=cache), layer(x[:, 7:], cache=cache)]
    >>> torch.allclose(torch.cat(parts, 1), out, atol=1e-5)
    True
    """

    rotary: RotaryEmbedding | None
    ffn: FeedForward | GatedFeedForward

    def __init__(
        self,
        config: LayerConfig | str,
        *,
        rotary: RotaryEmbedding | None = None,
        keep_products: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        config = config_of(config)
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise TypeError(f"rotary: expected RotaryEmbedding, got {type(rotary).__name__}")
        config = replace(config, **changes) if changes else config
        self.config = config
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            config.is_causal,
            out_bias=config.out_bias,
            **where,
        )
        network = GatedFeedForward if config.gated else FeedForward
        sizes = (config.embed_dim, config.ffn_dim)
        self.ffn = network(*sizes, config.activation, config.ffn_bias, keep_products=keep_products, **where)
        norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.attention_norm = norm(config.embed_dim, config.eps, **where)
        self.ffn_norm = norm(config.embed_dim, config.eps, **where)
        if config.rotary_base is None:
            self.rotary = None
        elif rotary is not None:
            self.rotary = rotary
        else:
            self.rotary = RotaryEmbedding(
                config.head_dim, config.max_positions, config.rotary_base, device=device
            )

    @classmethod
    def from_hugging_face(cls, layer: nn.Module) -> TransformerLayer:
        """A copy of a layer of Hugging Face's Llama, ViT or BERT: its shape, weights, type and device."""
        from tilewise.nn.hugging_face import config_and_rotary

        config, rotary = config_and_rotary(layer)
        parameter = next(layer.parameters())
        result = cls(config, rotary=rotary, device=parameter.device, dtype=parameter.dtype)
        result.load_hugging_face(layer)
        return result.to(parameter.device).train(layer.training)

    def load_hugging_face(self, layer: nn.Module) -> None:
        """Copies the weights of a Hugging Face layer of the same kind and shape."""
        from tilewise.nn.hugging_face import load_weights

        load_weights(self, layer)

    def make_cache(self, batch: int, capacity: int, page_size: int | None = None) -> KVCache:
        """An empty cache of that many tokens a sequence, in pages where a `page_size` is given."""
        at_least(0, batch=batch, capacity=capacity)
        weight = self.attention.k_proj.weight
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        lengths = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        if page_size is None:
            k, v = (weight.new_zeros(batch, heads, capacity, dim) for _ in range(2))
            return KVCache(k.requires_grad_(False), v.requires_grad_(False), lengths)
        at_least(1, page_size=page_size)
        pages = -(-capacity // page_size)
        table = torch.arange(batch * pages, dtype=torch.int32, device=weight.device).view(batch, pages)
        k, v = (weight.new_zeros(batch * pages, heads, page_size, dim) for _ in range(2))
        return KVCache(k.requires_grad_(False), v.requires_grad_(False), lengths, table)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The layer on x [B, S, E].

        Args:
            x: the tokens; with a cache, those that come after the ones it holds.
            positions: int32 or int64 [B or 1, S] or [S], for the rotary embedding; counted from the first
                token by default, or from the cache's length.
            attn_mask: broadcasts to [B, Hq, S, S], see `tilewise.attention`; none with a cache.
            cache: where keys and values are kept. There is no gradient through it.
        """
        check_tensors(x=x)
        check_optional_tensors(positions=positions, attn_mask=attn_mask)
        if x.dim() != 3 or x.shape[-1] != self.config.embed_dim:
            reject("x", f"[B, S, {self.config.embed_dim}]", list(x.shape))
        if cache is None:
            return self._forward(x, positions, attn_mask, None)
        if attn_mask is not None:
            reject("attn_mask", "none with a cache", list(attn_mask.shape))
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache: expected KVCache, got {type(cache).__name__}")
        check_tensors(**{"cache.k": cache.k, "cache.v": cache.v, "cache.lengths": cache.lengths})
        cache.lengths += x.shape[1]  # first of all: what follows are kernels that begin one under another
        try:
            return self._forward(x, positions, None, cache)
        except Exception:
            cache.lengths -= x.shape[1]
            raise

    def _forward(
        self, x: Tensor, positions: Tensor | None, attn_mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        if self.config.norm_first:
            x = self._attend(self.attention_norm(x), x, positions, attn_mask, cache)
            return self.ffn(self.ffn_norm(x), residual=x)
        x = self.attention_norm(self._attend(x, x, positions, attn_mask, cache))
        return self.ffn_norm(self.ffn(x, residual=x))

    def _attend(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor | None,
        attn_mask: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Attention with its projections, and the residual added."""
        parts = self.attention
        q, k, v = (
            rows.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for rows in self._project(x)
        )
        if cache is not None:
            out = self._attend_cached(q, k, v, positions, cache)
        else:
            if self.rotary is not None:
                q, k = self.rotary(q, k, positions)
            out = attention(q, k, v, attn_mask, is_causal=self.config.is_causal, enable_gqa=True)
        rows = out.transpose(1, 2).flatten(2)
        return linear(rows, parts.out_proj.weight, parts.out_proj.bias, residual=residual)

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, by one product where no gradient is recorded."""
        parts = (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        recorded = torch.is_grad_enabled() and any(p.weight.requires_grad for p in parts)
        if _ops.eager() and not recorded:
            weight = joint(*(p.weight for p in parts))
            bias = None if parts[0].bias is None else joint(*(p.bias for p in parts))
            if weight is not None and (bias is None) == (parts[0].bias is None):
                return linear(x, weight, bias).split([p.out_features for p in parts], -1)
        return [linear(x, p.weight, p.bias) for p in parts]

    def _attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, cache: KVCache
    ) -> Tensor:
        if self.rotary is None:
            cos = sin = q.new_empty((1, q.shape[2], 0), dtype=torch.float32)
            positions, interleaved = None, False
        else:
            cos, sin, interleaved = self.rotary.cos, self.rotary.sin, self.rotary.interleaved
        q = rope_into_cache(
            *(q, k, v, cache.k, cache.v, cos, sin, positions),
            cache_ends=cache.lengths,
            page_table=cache.page_table,
            interleaved=interleaved,
        )
        return attention_decode(
            q, cache.k, cache.v, cache.lengths, cache.page_table, is_causal=self.config.is_causal
        )
