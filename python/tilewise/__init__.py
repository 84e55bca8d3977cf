"""Exact attention for PyTorch, the same contract on every device."""

from tilewise import masks, nn, reference
from tilewise._binding import version
from tilewise._errors import DeviceError, Error, InvalidArgument, Unsupported
from tilewise._scripting import refuse_scripting
from tilewise._triton import kernel_names as kernels
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
from tilewise.triangle import triangle_attention

__version__: str = version()

refuse_scripting(attention, attention_decode, attention_varlen, merge_states, scaled_dot_product_attention)
refuse_scripting(apply_rope, ffn, layer_norm, linear, rms_norm, rope_into_cache)

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
    "masks",
    "merge_states",
    "nn",
    "reference",
    "rms_norm",
    "rope_into_cache",
    "rope_tables",
    "scaled_dot_product_attention",
    "triangle_attention",
]
