"""A transformer layer as PyTorch's functions, on the weights of one of ours."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilewise import nn
from tilewise.bench.operations.rope import turned


def forward(layer: nn.TransformerLayer, x: Tensor, cache: nn.KVCache | None = None) -> Tensor:
    """The layer on x [B, S, E]; with a cache, as those of its last places."""
    if layer.config.norm_first:
        x = x + _attend(layer, _norm(layer, layer.attention_norm, x), cache)
        return x + _network(layer, _norm(layer, layer.ffn_norm, x))
    x = _norm(layer, layer.attention_norm, x + _attend(layer, x, cache))
    return _norm(layer, layer.ffn_norm, x + _network(layer, x))


def _norm(layer: nn.TransformerLayer, module: Any, x: Tensor) -> Tensor:
    size = (layer.config.embed_dim,)
    if layer.config.norm == "rms":
        return F.rms_norm(x, size, module.weight, layer.config.eps)
    return F.layer_norm(x, size, module.weight, module.bias, layer.config.eps)


def _attend(layer: nn.TransformerLayer, x: Tensor, cache: nn.KVCache | None) -> Tensor:
    config, parts = layer.config, layer.attention
    q, k, v = (_heads(x, p, config.head_dim) for p in (parts.q_proj, parts.k_proj, parts.v_proj))
    first = 0 if cache is None else cache.k.shape[2] - x.shape[1]
    if layer.rotary is not None:
        angles = [table[first : first + x.shape[1]] for table in (layer.rotary.cos, layer.rotary.sin)]
        q, k = turned(q, *angles), turned(k, *angles)
    if cache is not None:
        cache.k[:, :, first:], cache.v[:, :, first:] = k, v
        k, v = cache.k, cache.v
    grouped = config.num_kv_heads != config.num_heads
    causal = config.is_causal and cache is None
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return F.linear(out.transpose(1, 2).flatten(2), parts.out_proj.weight, parts.out_proj.bias)


def _heads(x: Tensor, projection: Any, dim: int) -> Tensor:
    rows = F.linear(x, projection.weight, projection.bias)
    return rows.unflatten(-1, (-1, dim)).transpose(1, 2)


def _network(layer: nn.TransformerLayer, x: Tensor) -> Tensor:
    parts: Any = layer.ffn
    up = F.linear(x, parts.up_proj.weight, parts.up_proj.bias)
    if layer.config.gated:
        up = F.silu(F.linear(x, parts.gate_proj.weight, parts.gate_proj.bias)) * up
    else:
        up = F.gelu(up)
    return F.linear(up, parts.down_proj.weight, parts.down_proj.bias)
