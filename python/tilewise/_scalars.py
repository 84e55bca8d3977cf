"""Arguments that are not tensors: each is of its kind, or an exception names it.

Numbers and flags may come as NumPy's, as tensors of one element, or as torch's symbols while it traces.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from tilewise._errors import Unsupported, reject, told


def flag_of(name: str, value: Any) -> Any:
    """A bool, or a number that equals one."""
    if value is True or value is False or isinstance(value, torch.SymBool):
        return value
    if (not hasattr(value, "__index__") and not hasattr(value, "__float__")) or isinstance(value, Tensor):
        raise TypeError(f"{name}: expected bool, got {told(value)}")
    try:
        known = value in (True, False)
    except (TypeError, ValueError):  # NumPy's arrays equal nothing
        known = False
    if not known:
        raise TypeError(f"{name}: expected bool, got {told(value)}")
    return bool(value)


def whole_of(name: str, value: Any) -> Any:
    """An int that fits into 64 bits."""
    whole = value
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise TypeError(f"{name}: expected int, got {type(value).__name__}")
    if not isinstance(value, int):
        try:
            whole = operator.index(value)
        except (TypeError, ValueError, RuntimeError):  # an array, or a tensor of something else
            raise TypeError(f"{name}: expected int, got {told(value)}") from None
    if torch.compiler.is_dynamo_compiling():  # perhaps a symbol, which no comparison should tie down
        return whole
    if not -(2**63) <= whole < 2**63:
        reject(name, "a whole number that fits 64 bits", told(value))
    return whole


def number_of(name: str, value: Any) -> float:
    """A float, be it infinite or none: the library says what it may be."""
    if isinstance(value, float):
        return value
    if not isinstance(value, int) and not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected float, got {type(value).__name__}")
    check_no_gradient(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected float, got {told(value)}") from None
    except OverflowError:
        reject(name, "a number that a float can hold", told(value))


def scale_of(scale: Any) -> Any:
    return scale if scale is None or isinstance(scale, torch.SymFloat) else number_of("scale", scale)


def text_of(name: str, value: Any, *choices: str) -> str:
    """A str; one of `choices`, where there are any."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected str, got {type(value).__name__}")
    if choices and value not in choices:
        words = [repr(choice) for choice in choices]
        reject(name, f"{', '.join(words[:-1])} or {words[-1]}", repr(value))
    return value


def check_no_gradient(name: str, value: Any) -> None:
    """torch would make a number of it without a word, and a parameter would never be trained."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        advice = "multiply query by it, or detach it" if name == "scale" else "detach it"
        raise Unsupported(f"{name}: no gradient is computed for it; {advice}")


def at_least(least: int, **sizes: Any) -> None:
    """Sizes by their names: whole numbers from `least` on."""
    for name, size in sizes.items():
        if whole_of(name, size) < least:
            reject(name, f"at least {least}", size)
