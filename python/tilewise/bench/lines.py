"""What each line of a record has to be: fields by name, and what is wrong with one in a few words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from tilewise.bench.problem import PASSES

Line = dict[str, Any]
# What a value has to be, in words; empty where it is.
Rule = Callable[[Any], str]

_LARGEST_FIGURE, _SMALLEST_FIGURE = 1e15, 1e-30  # a line with others was not measured on this earth
LARGEST_SIZE = 2**48


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "text"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _count(value: Any, least: int = 0) -> str:
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_SIZE
    return "" if fits else f"a whole number, {least} or above"


def _size(value: Any) -> str:
    """Axes are logarithmic, so that 0 has no place on them."""
    return _count(value, 1)


def _figure(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        return "a finite number"
    fits = value == 0 or _SMALLEST_FIGURE <= value <= _LARGEST_FIGURE
    return "" if fits else f"0, or a number from {_SMALLEST_FIGURE:g} to {_LARGEST_FIGURE:g}"


def _signed(value: Any) -> str:
    return _figure(abs(value)) if isinstance(value, (int, float)) else "a finite number"


def _pass(value: Any) -> str:
    return "" if value in PASSES else f"one of {', '.join(PASSES)}"


def _optional(rule: Rule) -> Rule:
    return lambda value: "" if value is None else _or_null(rule(value))


def _or_null(words: str) -> str:
    return f"{words}, or null" if words else ""


def _window(value: Any) -> str:
    sides = isinstance(value, list) and len(value) == 2 and not any(_optional(_count)(x) for x in value)
    return "" if sides else "[left, right]"


def _sizes(value: Any) -> str:
    if not isinstance(value, dict) or not value or any(_size_or_word(x) for x in value.values()):
        return "sizes by their names"
    counted = [value[name] for name in ("m", "tokens") if name in value]  # by which plots are ordered
    return "whole numbers of rows and tokens" if any(_size(x) for x in counted) else ""


def _size_or_word(value: Any) -> str:
    return "" if isinstance(value, (str, bool)) else _optional(_signed)(value)


def _by_threads(value: Any) -> str:
    fits = isinstance(value, dict) and all(key.isdecimal() and len(key) < 7 for key in value)
    return "" if fits and not any(_figure(x) for x in value.values()) else "figures by numbers of threads"


def _by_name(value: Any) -> str:
    fits = isinstance(value, dict) and not any(_figure(x) for x in value.values())
    return "" if fits else "figures by name"


_ENVIRONMENT: dict[str, Rule] = {
    **dict.fromkeys(("device", "gpu", "cpu", "driver", "torch", "tilewise", "version"), _text),
    **dict.fromkeys(("date", "commit", "command"), _text),
    "threads": _count,
    "peak_gflops": _by_threads,
    "copy_gbps": _by_threads,
}
_RATE: dict[str, Rule] = {
    **{"suite": _text, "impl": _text, "device": _text, "dtype": _optional(_text)},
    **{"tflops": _optional(_figure), "gbps": _optional(_figure)},
}
FIGURES = ("ms", "spread", "tflops", "gbps", "peak_mb", "error")
_SHAPE = ("b", "hq", "hkv", "sq", "sk", "d", "dv")
# Counters of one kernel that an implementation launched.
_PROFILE: dict[str, Rule] = {
    **dict.fromkeys(("impl", "kernel", "dtype", "direction", "of", "features"), _text),
    **{"figures": _by_name, "sizes": _sizes, "causal": _flag},
    **dict.fromkeys(_SHAPE, _size),
}
_EVERY_PROFILE = ("impl", "kernel", "dtype", "direction", "figures")
_ROW: dict[str, Rule] = {
    **dict.fromkeys(("suite", "op", "impl", "device", "dtype", "features", "skipped"), _text),
    **{"pass": _pass, "causal": _flag, "tf32": _flag, "window": _optional(_window), "sizes": _sizes},
    **dict.fromkeys(_SHAPE, _size),
    **dict.fromkeys(FIGURES, _optional(_figure)),
    **dict.fromkeys(("relative_error", "peak_tflops", "peak_gflops", "ms_min"), _optional(_figure)),
    **dict.fromkeys(("percent_of_peak", "percent_of_copy", "cpu_share"), _optional(_figure)),
    **{"threads": _optional(_count), "runs": _count, "rounds": _count, "level": _optional(_text)},
}
_EVERY_ROW = ("suite", "op", "pass", "impl", "device", "dtype", "causal")


def parsed(content: str) -> Line:
    """A line as an object. Raises ValueError where it is no JSON, and where it is no object, in words."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        line = json.loads(content, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(line, dict):
        raise TypeError
    return line


def wrong_with(line: Line) -> str:
    """`field: expected …, got …` for the first field that is not what it has to be; else empty.

    >>> wrong_with({"op": "rate", "impl": "gemm", "tflops": "fast"})
    "tflops: expected a finite number, or null, got 'fast'"
    """
    try:
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "text: expected valid UTF-8, got half of a surrogate pair"
    if "environment" in line:
        given = line["environment"]
        if not isinstance(given, dict):
            return _told("environment", "an object", given)
        return _first_wrong(given, _ENVIRONMENT, (), "environment.")
    if line.get("op") == "rate":
        return _first_wrong(line, _RATE, ("impl",))
    if line.get("op") == "profile":
        required = _EVERY_PROFILE if "sizes" in line else (*_EVERY_PROFILE, "b", "hq", "sq", "d")
        return _first_wrong(line, _PROFILE, required)
    return _wrong_with_row(line) if is_row(line) else ""


def is_row(line: Line) -> bool:
    return "pass" in line and "impl" in line


def _wrong_with_row(line: Line) -> str:
    required = [*_EVERY_ROW, *(("sizes",) if "sizes" in line or line.get("op") != "attention" else _SHAPE)]
    if wrong := _first_wrong(line, _ROW, required):
        return wrong
    if line.get("ms"):
        for name in FIGURES:
            if name not in line:
                return _told(name, "a figure, as ms has one")
        for name in ("tflops", "spread"):
            if line[name] is None:
                return _told(name, "a figure, as ms has one", None)
    return ""


def _first_wrong(given: Mapping[str, Any], rules: Mapping[str, Rule], required: Any, place: str = "") -> str:
    for name in required:
        if name not in given:
            return _told(place + name, rules[name](...) or "a value")
    for name, rule in rules.items():
        if name in given and (expected := rule(given[name])):
            return _told(place + name, expected, given[name])
    return ""


_NOTHING = object()


def _told(name: str, expected: str, value: Any = _NOTHING) -> str:
    if value is _NOTHING:
        return f"{name}: expected {expected}, got none"
    text = json.dumps(value) if isinstance(value, (dict, list, bool, type(None))) else repr(value)
    return f"{name}: expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}"
