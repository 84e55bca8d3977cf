"""A small GPT on tilewise.nn, and the same model on PyTorch's own operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tilewise.nn import KVCache, LayerConfig, LayerNorm, RotaryEmbedding, TransformerLayer
from torch import Tensor, nn


class TorchLayer(TransformerLayer):
    """The same layer with the same weights. Its attention is SDPA, and all else is PyTorch's, too."""

    def forward(self, x: Tensor) -> Tensor:
        parts, width, eps = self.attention, (self.config.embed_dim,), self.config.eps
        y = F.layer_norm(x, width, self.attention_norm.weight, self.attention_norm.bias, eps)
        projections = (parts.q_proj, parts.k_proj, parts.v_proj)
        q, k, v = (p(y).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2) for p in projections)
        out = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + parts.out_proj(out.transpose(1, 2).flatten(2))
        y = F.layer_norm(x, width, self.ffn_norm.weight, self.ffn_norm.bias, eps)
        return x + self.ffn.down_proj(F.gelu(self.ffn.up_proj(y)))

    def _turned(self, rows: Tensor) -> Tensor:
        """The rotary embedding of rows [B, H, S, D]."""
        assert self.rotary is not None
        cos, sin = (table[: rows.shape[2]] for table in (self.rotary.cos, self.rotary.sin))
        first, second = rows.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class GPT(nn.Module):
    """Tokens int64 [B, S] to logits [B, S, vocabulary]."""

    def __init__(
        self, vocabulary: int, positions: int, dim: int, depth: int, heads: int, layer: Any = TransformerLayer
    ) -> None:
        super().__init__()
        config = LayerConfig(
            embed_dim=dim, num_heads=heads, ffn_dim=4 * dim, is_causal=True,
            rotary_base=10000.0, max_positions=positions,
        )  # fmt: skip
        rotary = RotaryEmbedding(config.head_dim, positions)
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers: Any = nn.ModuleList(layer(config, rotary=rotary) for _ in range(depth))
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def _next(self, tokens: Tensor, caches: list[KVCache]) -> Tensor:
        """Logits [B, vocabulary] of what follows `tokens`, which come after those in the caches."""
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache=cache)
        return self.head(self.norm(x[:, -1]))

    @torch.inference_mode()
    def sample(self, tokens: Tensor, count: int, temperature: float, seed: int) -> Tensor:
        """`count` tokens [B, count] after these, each drawn from what the model expects next.

        The prompt is read at once, then one token at a time over the cache of keys and values.
        """
        generator = torch.Generator().manual_seed(seed)
        caches = [layer.make_cache(len(tokens), tokens.shape[1] + count) for layer in self.layers]
        drawn = []
        for _ in range(count):
            logits = self._next(tokens, caches).float().cpu()
            shares = (logits / temperature).softmax(-1)
            drawn.append(torch.multinomial(shares, 1, generator=generator).to(tokens.device))
            tokens = drawn[-1]
        return torch.cat(drawn, 1)
