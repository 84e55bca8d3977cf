"""What a transformer layer is made of, and the layers of known models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tilewise._errors import reject
from tilewise._scalars import at_least, flag_of, number_of, text_of
from tilewise.functional import ACTIVATIONS, Activation


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The shape of a `TransformerLayer`.

    >>> LayerConfig(embed_dim=64, num_heads=4, ffn_dim=256).head_dim
    16
    """

    embed_dim: int
    num_heads: int
    ffn_dim: int
    num_kv_heads: int = 0
    """Heads of keys and values; 0: as many as of queries."""
    head_dim: int = 0
    """0: embed_dim / num_heads."""
    norm: Literal["rms", "layer"] = "layer"
    eps: float = 1e-5
    norm_first: bool = True
    """Whether norms stand before attention and network (Llama, ViT), or after the residual add (BERT)."""
    gated: bool = False
    activation: Activation = "gelu"
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    is_causal: bool = False
    rotary_base: float | None = None
    """None: no rotary embedding."""
    max_positions: int = 0
    """Rows of the rotary embedding's tables."""

    def __post_init__(self) -> None:
        at_least(1, embed_dim=self.embed_dim, num_heads=self.num_heads, ffn_dim=self.ffn_dim)
        at_least(0, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, max_positions=self.max_positions)
        for name in ("norm_first", "gated", "qkv_bias", "out_bias", "ffn_bias", "is_causal"):
            flag_of(name, getattr(self, name))
        if not 0.0 <= number_of("eps", self.eps) < math.inf:
            reject("eps", "a finite number, 0 or above", self.eps)
        text_of("activation", self.activation, *ACTIVATIONS)
        text_of("norm", self.norm, "rms", "layer")
        if self.rotary_base is not None:
            number_of("rotary_base", self.rotary_base)
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            reject("num_kv_heads", f"a divisor of num_heads {self.num_heads}", self.num_kv_heads)
        if self.head_dim == 0:
            if self.embed_dim % self.num_heads:
                reject(
                    "embed_dim", f"a multiple of num_heads {self.num_heads}, or a head_dim", self.embed_dim
                )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)
        if self.rotary_base is not None and self.max_positions < 1:
            reject("max_positions", "at least 1 with a rotary embedding", self.max_positions)


def _llama(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_dim: int,
    rotary_base: float = 10000.0,
    max_positions: int = 4096,
) -> LayerConfig:
    return LayerConfig(
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        norm="rms",
        eps=1e-5,
        gated=True,
        activation="silu",
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        is_causal=True,
        rotary_base=rotary_base,
        max_positions=max_positions,
    )


CONFIGS: dict[str, LayerConfig] = {
    "vit-b/16": LayerConfig(embed_dim=768, num_heads=12, ffn_dim=3072, eps=1e-12),
    "bert-base": LayerConfig(embed_dim=768, num_heads=12, ffn_dim=3072, eps=1e-12, norm_first=False),
    "llama-2-7b": _llama(4096, 32, 32, 11008),
    "llama-2-13b": _llama(5120, 40, 40, 13824),
    "llama-2-70b": _llama(8192, 64, 8, 28672),
    "llama-3-8b": _llama(4096, 32, 8, 14336, rotary_base=500000.0, max_positions=8192),
}


def config_of(name: str | LayerConfig) -> LayerConfig:
    if isinstance(name, LayerConfig):
        return name
    text_of("config", name)
    if name not in CONFIGS:
        reject("config", f"one of {', '.join(CONFIGS)}", repr(name))
    return CONFIGS[name]
