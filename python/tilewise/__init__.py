"""Exact attention for PyTorch, the same contract on every device."""

from tilewise import nn, reference
from tilewise._errors import DeviceError, Error, InvalidArgument, Unsupported
from tilewise._ops import attention_kernels as kernels
from tilewise._ops import version
from tilewise.attention import (
    attention,
    attention_decode,
    attention_varlen,
    explain,
    merge_states,
    scaled_dot_product_attention,
)
from tilewise.block_mask import BlockMask

__version__: str = version()

__all__ = [
    "BlockMask",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "Unsupported",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "kernels",
    "merge_states",
    "nn",
    "reference",
    "scaled_dot_product_attention",
]
