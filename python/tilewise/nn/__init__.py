"""Layers on Tilewise: attention, and the transformer layer around it."""

from tilewise._scripting import refuse_scripting
from tilewise.nn.attention import Attention, MultiheadAttention
from tilewise.nn.blocks import FeedForward, GatedFeedForward, LayerNorm, RMSNorm, RotaryEmbedding
from tilewise.nn.configs import CONFIGS, LayerConfig
from tilewise.nn.layer import KVCache, TransformerLayer

__all__ = [
    "CONFIGS",
    "Attention",
    "FeedForward",
    "GatedFeedForward",
    "KVCache",
    "LayerConfig",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "TransformerLayer",
]

refuse_scripting(Attention, MultiheadAttention, TransformerLayer)
refuse_scripting(FeedForward, GatedFeedForward, LayerNorm, RMSNorm, RotaryEmbedding)
