"""Exact attention for PyTorch, the same contract on every device."""

from tilewise import nn, reference
from tilewise._binding import attention_kernels as kernels
from tilewise._binding import version
from tilewise._errors import DeviceError, Error, InvalidArgument, Unsupported
from tilewise.attention import (
    attention,
    attention_decode,
    attention_varlen,
    explain,
    merge_states,
    scaled_dot_product_attention,
)
from tilewise.block_mask import BlockMask
from tilewise.functional import apply_rope, ffn, layer_norm, linear, rms_norm, rope_into_cache, rope_tables

__version__: str = version()

__all__ = [
    "BlockMask",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "Unsupported",
    "apply_rope",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "ffn",
    "kernels",
    "layer_norm",
    "linear",
    "merge_states",
    "nn",
    "reference",
    "rms_norm",
    "rope_into_cache",
    "rope_tables",
    "scaled_dot_product_attention",
]
