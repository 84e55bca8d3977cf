"""A Llama layer as Hugging Face has it, attention by SDPA, on the weights of one of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise import nn
from tilewise.bench.implementations import CannotTake
from tilewise.bench.operations.operation import Arguments, Operation
from tilewise.nn.hugging_face import places

NAME = "hugging face"


def bind(problem: Operation, arguments: Arguments) -> Callable[[], Any]:
    x, ours = arguments.values
    layer = _layer(ours.config)
    for _, mine, theirs in places(ours, layer):
        for kind in ("weight", "bias"):
            if (of := getattr(mine, kind, None)) is not None:
                theirs._parameters.pop(kind, None)
                setattr(theirs, kind, of)  # the same memory, whether a parameter or a part of one
    tables = (ours.rotary.cos, ours.rotary.sin)
    angles = tuple(torch.cat((of, of), -1)[None, : x.shape[1]].to(x.dtype) for of in tables)

    def call() -> Any:
        found = layer(x, position_embeddings=angles)
        return found[0] if isinstance(found, tuple) else found

    return call


def _layer(config: nn.LayerConfig) -> Any:
    if not (config.rotary_base and config.gated and config.norm == "rms"):
        raise CannotTake("of Hugging Face's layers only Llama's is measured")
    try:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    except ImportError:
        raise CannotTake("transformers is not installed") from None
    shape = llama_config(config)
    shape._attn_implementation = "sdpa"
    with torch.device("meta"):
        return LlamaDecoderLayer(shape, 0).eval()


def llama_config(config: nn.LayerConfig, **more: Any) -> Any:
    """What transformers calls the shape of a Llama whose layers are such; `more` is of the whole model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.embed_dim,
        intermediate_size=config.ffn_dim,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.eps,
        **more,
    )
