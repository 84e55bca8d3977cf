"""Weights of Hugging Face's layers for `TransformerLayer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tilewise._errors import Unsupported, reject
from tilewise.functional import Activation
from tilewise.nn.blocks import RotaryEmbedding
from tilewise.nn.configs import LayerConfig

# Where each part of ours stands in Llama, in ViT (now and in older releases) and in BERT.
_PLACES: dict[str, tuple[str, ...]] = {
    "attention.q_proj": (
        *("self_attn.q_proj", "attention.q_proj"),
        *("attention.attention.query", "attention.self.query"),
    ),
    "attention.k_proj": (
        *("self_attn.k_proj", "attention.k_proj"),
        *("attention.attention.key", "attention.self.key"),
    ),
    "attention.v_proj": (
        *("self_attn.v_proj", "attention.v_proj"),
        *("attention.attention.value", "attention.self.value"),
    ),
    "attention.out_proj": ("self_attn.o_proj", "attention.o_proj", "attention.output.dense"),
    "attention_norm": ("input_layernorm", "layernorm_before", "attention.output.LayerNorm"),
    "ffn_norm": ("post_attention_layernorm", "layernorm_after", "output.LayerNorm"),
    "ffn.gate_proj": ("mlp.gate_proj",),
    "ffn.up_proj": ("mlp.up_proj", "mlp.fc1", "intermediate.dense"),
    "ffn.down_proj": ("mlp.down_proj", "mlp.fc2", "output.dense"),
}

_KINDS = ("LlamaDecoderLayer", "ViTLayer", "BertLayer")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _part(layer: nn.Module, ours: str) -> Any:
    """Theirs for one of our parts, or None."""
    modules = dict(layer.named_modules())
    return next((modules[place] for place in _PLACES[ours] if place in modules), None)


def _config(layer: nn.Module) -> Any:
    for module in layer.modules():
        if (config := getattr(module, "config", None)) is not None:
            return config
    raise Unsupported("layer: none of its modules has a config to read its heads and activation from")


def config_and_rotary(layer: nn.Module) -> tuple[LayerConfig, RotaryEmbedding | None]:
    """The shape of a Hugging Face layer."""
    kind = type(layer).__name__
    if kind not in _KINDS:
        reject("layer", f"one of {', '.join(_KINDS)}", kind)
    config = _config(layer)
    if config.hidden_act not in _ACTIVATIONS:
        reject("layer", f"an activation among {', '.join(_ACTIVATIONS)}", config.hidden_act)
    query, out, up = (_part(layer, x) for x in ("attention.q_proj", "attention.out_proj", "ffn.up_proj"))
    norm = _part(layer, "attention_norm")
    llama = kind == "LlamaDecoderLayer"
    heads = config.num_attention_heads
    rotary = _rotary(config, query.out_features // heads) if llama else None
    shape = LayerConfig(
        embed_dim=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=query.out_features // heads,
        ffn_dim=config.intermediate_size,
        norm="rms" if llama else "layer",
        eps=norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps,
        norm_first=kind != "BertLayer",
        gated=_part(layer, "ffn.gate_proj") is not None,
        activation=_ACTIVATIONS[config.hidden_act],
        qkv_bias=query.bias is not None,
        out_bias=out.bias is not None,
        ffn_bias=up.bias is not None,
        is_causal=llama,
        rotary_base=None if rotary is None else rotary.base,
        max_positions=0 if rotary is None else rotary.max_positions,
    )
    return shape, rotary


def _rotary(config: Any, head_dim: int) -> RotaryEmbedding:
    """Llama's, scaled or not."""
    parameters: dict[str, Any] = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    base: Any = parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    frequencies = None
    if parameters.get("rope_type", "default") != "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaRotaryEmbedding(config)
        if theirs.attention_scaling != 1.0:
            raise Unsupported(
                f"layer: rotary embedding of type {parameters['rope_type']} also scales attention, "
                "which is not supported"
            )
        frequencies = theirs.inv_freq
    return RotaryEmbedding(head_dim, config.max_position_embeddings, base, inverse_frequencies=frequencies)


def places(ours: nn.Module, layer: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The parts of ours that have weights, by name, and theirs for each."""
    modules = dict(ours.named_modules())
    for name in _PLACES:
        theirs = _part(layer, name)
        if name not in modules:
            if theirs is not None:
                reject("layer", f"no {name}", "one")
        elif theirs is None:
            reject("layer", f"a module for {name}", f"none in {type(layer).__name__}")
        else:
            yield name, modules[name], theirs


@torch.no_grad()
def load_weights(ours: nn.Module, layer: nn.Module) -> None:
    """Copies the weights of `layer` into `ours`, after all of them were found to fit."""
    pairs = []
    for name, mine, theirs in places(ours, layer):
        for kind in ("weight", "bias"):
            to, source = (getattr(x, kind, None) for x in (mine, theirs))
            shapes = ["none" if x is None else str(list(x.shape)) for x in (to, source)]
            if shapes[0] != shapes[1]:
                reject(f"layer: {name}.{kind}", *shapes)
            if to is not None and source is not None:
                pairs.append((to, source))
    for to, source in pairs:
        to.copy_(source)
