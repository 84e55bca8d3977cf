"""Types of options for argparse, which says what is wrong with the option's name before it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """A whole number.

    >>> whole(1)("8")
    8
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {least} or above, got {text!r}")
        return value

    return read


def number(least: float) -> Callable[[str], float]:
    """One that is finite.

    >>> number(0)("0.1")
    0.1
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"expected a number, {least:g} or above, got {text!r}")
        return value

    return read


def listed(kind: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Some, by commas.

    >>> listed(whole(1))("8,16")
    [8, 16]
    """
    return lambda text: [kind(part) for part in text.split(",") if part]
