"""The library's exceptions, and how they come back from an operator.

PyTorch's stable ABI lets one kind of exception through, so the binding writes the kind in front of the text.
Turning it back costs nothing unless something was raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch


class Error(RuntimeError):
    """What every exception of the library derives from."""


class InvalidArgument(Error, ValueError):
    """An argument is malformed. The text names it, what was expected and what came."""


class Unsupported(Error, NotImplementedError):
    """The arguments are sound, but no kernel (or not the one asked for) can take the problem."""


class DeviceError(Error):
    """A device or its driver failed."""


_KINDS: dict[str, type[Error]] = {
    f"tilewise.{kind.__name__}": kind for kind in (InvalidArgument, Unsupported, DeviceError)
}
_WRONG_TYPE = re.compile(
    r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'"
)

_OUT_OF_MEMORY = re.compile(r"tilewise\.OutOfMemory: tried to allocate (\d+) bytes on (\S+)")

# The library's words for types that torch's users know by others, and torch's C++ ones.
_TYPES = {
    **{"i32": "int32", "Byte": "uint8", "Char": "int8", "Short": "int16", "Long": "int64"},
    **{"ComplexHalf": "complex32", "ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}

_TENSORS = {
    *("query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "key_lengths", "page_table"),
    "logit_scale",
    *("cumulative_q", "cumulative_k"),
    *("block_counts", "block_indices", "block_full_counts", "block_full_indices"),
    *("block_tile_ids", "block_tiles"),
}

# Python's names for arguments that the library or the operators know by others.
DENSE_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attn_mask",
    "dropout.probability": "dropout_p",
    "window.left": "window[0]",
    "window.right": "window[1]",
    "window_left": "window[0]",
    "window_right": "window[1]",
    "kernel_name": "kernel",
    **{f"block_{field}": f"block_mask.{field}" for field in ("counts", "indices", "tile_ids", "tiles")},
    **{f"block_full_{field}": f"block_mask.full_{field}" for field in ("counts", "indices")},
    **{f"block_{side}": f"block_mask.block_{side}" for side in ("q", "k")},
}
VARLEN_NAMES = DENSE_NAMES | {
    "packed.cumulative_q": "cu_seqlens_q",
    "packed.cumulative_k": "cu_seqlens_k",
    "packed.max_length_q": "max_seqlen_q",
    "packed.max_length_k": "max_seqlen_k",
    "cumulative_q": "cu_seqlens_q",
    "cumulative_k": "cu_seqlens_k",
    "max_length_q": "max_seqlen_q",
    "max_length_k": "max_seqlen_k",
}
DECODE_NAMES = DENSE_NAMES | {
    "k": "k_cache",
    "v": "v_cache",
    "key": "k_cache",
    "value": "v_cache",
    "key_lengths": "cache_seqlens",
}


def translated(error: Exception, arguments: Mapping[str, Any], names: Mapping[str, str]) -> Exception:
    """The exception to raise for what a call of an operator raised: of the library's kind, in Python's names.

    `arguments` are the operator's by name.
    """
    text = str(error)
    kind, _, message = text.partition(": ")
    if kind in _KINDS:
        return _KINDS[kind](_renamed(message, names))
    if isinstance(error, Error):
        return type(error)(_renamed(text, names))
    if match := _OUT_OF_MEMORY.match(text):
        return _out_of_memory(int(match[1]), match[2])
    for argument, value in arguments.items():
        name = names.get(argument, argument)
        optional = argument not in ("query", "key", "value")
        if argument in _TENSORS and not (isinstance(value, torch.Tensor) or (value is None and optional)):
            return TypeError(f"{name}: expected Tensor, got {type(value).__name__}")
        if isinstance(value, torch.Tensor):
            try:
                check_dense(name, value)
            except InvalidArgument as wrong:
                return wrong
    if match := _WRONG_TYPE.search(text):
        expected, argument, given = match.groups()
        return TypeError(f"{names.get(argument, argument)}: expected {expected}, got {given}")
    return error


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The same exception under other names of the arguments, for functions that know them by others."""
    return type(error)(_renamed(str(error), names))


def check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        given = "a nested one" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        reject(name, "a dense tensor", given)


def _out_of_memory(size: int, device: str) -> Exception:
    """torch's exception for memory that it does not have.

    The binding knows how much was asked for and nothing else. So torch is asked again: its own exception says
    the rest, and is of the kind that it has for the device.
    """
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return error
    # What the call had allocated before is free again, and was enough.
    if device == "cpu":
        return RuntimeError(
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes."
        )
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes on {device}.")


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """`argument: expected …, got …` under Python's names of the arguments and torch's of the types."""
    argument, separator, rest = message.partition(": ")
    argument = argument.replace("blocks.", "block_mask.")
    expected, got, given = rest.rpartition(", got ")
    if not (rest.startswith("expected ") and got):
        return names.get(argument, argument) + separator + rest
    words = {key: name for key, name in names.items() if key != "mask"} | _TYPES  # "a boolean mask"
    expected, given = (re.sub(r"\w+", lambda m: words.get(m[0], m[0]), part) for part in (expected, given))
    return names.get(argument, argument) + separator + expected + got + given


def told(value: object) -> str:
    """What was given, in few words.

    >>> told("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    >>> told(torch.zeros(2, 3))
    'a tensor [2, 3]'
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # anything may come of a stranger's repr, and of Python's own for numbers without end
        text = f"one of {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:39]}..."


def reject(argument: str, expected: str, given: object) -> NoReturn:
    """Raises InvalidArgument in the library's form."""
    raise InvalidArgument(f"{argument}: expected {expected}, got {given}")
