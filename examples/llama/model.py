"""Llama on tilewise.nn: the models' shapes, the whole model, and generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tilewise
import torch
from tilewise.nn import CONFIGS, KVCache, LayerConfig, RotaryEmbedding, TransformerLayer
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    layer: LayerConfig
    depth: int
    vocabulary: int = 32000


MODELS = {
    "llama-2-7b": LlamaConfig(CONFIGS["llama-2-7b"], depth=32),
    "llama-2-13b": LlamaConfig(CONFIGS["llama-2-13b"], depth=40),
    "llama-2-70b": LlamaConfig(CONFIGS["llama-2-70b"], depth=80),
    "tiny": LlamaConfig(
        replace(
            CONFIGS["llama-2-70b"],
            **{"embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 96},
        ),
        depth=2,
        vocabulary=128,
    ),
}


class Llama(nn.Module):
    """Tokens [B, S] to logits [B, vocabulary] of the token after the last."""

    def __init__(self, config: LlamaConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        layer, where = config.layer, {"device": device, "dtype": dtype}
        rotary = RotaryEmbedding(
            layer.head_dim, layer.max_positions, layer.rotary_base or 10000.0, device=device
        )
        self.embedding = nn.Embedding(config.vocabulary, layer.embed_dim, **where)
        self.layers: Any = nn.ModuleList(
            TransformerLayer(layer, rotary=rotary, **where) for _ in range(config.depth)
        )
        self.norm = tilewise.nn.RMSNorm(layer.embed_dim, layer.eps, **where)
        self.head = nn.Linear(layer.embed_dim, config.vocabulary, bias=False, **where)

    def make_caches(self, batch: int, capacity: int, page_size: int | None = None) -> list[KVCache]:
        return [layer.make_cache(batch, capacity, page_size) for layer in self.layers]

    def hidden(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """[B, S, E], after the last norm; with caches, tokens come after those they hold."""
        x = self.embedding(tokens)
        for n, layer in enumerate(self.layers):
            x = layer(x, cache=None if caches is None else caches[n])
        return self.norm(x)

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        return tilewise.linear(self.hidden(tokens, caches)[:, -1], self.head.weight)

    @torch.inference_mode()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """The `count` likeliest next tokens [B, count], each given those before it."""
        caches = self.make_caches(len(tokens), tokens.shape[1] + count)
        found = []
        for _ in range(count):
            tokens = self(tokens, caches).argmax(-1, keepdim=True)
            found.append(tokens)
        return torch.cat(found, 1)

    @torch.no_grad()
    def load_hugging_face(self, model: nn.Module) -> None:
        """Copies the weights of a LlamaForCausalLM of the same shape."""
        theirs: Any = model
        for layer, source in zip(self.layers, theirs.model.layers, strict=True):
            layer.load_hugging_face(source)
        self.embedding.weight.copy_(theirs.model.embed_tokens.weight)
        self.norm.weight.copy_(theirs.model.norm.weight)
        self.head.weight.copy_(theirs.lm_head.weight)
