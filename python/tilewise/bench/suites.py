"""Suites of problems: JSON files, which the C++ benchmark reads as well.

A suite is {"about": text, "devices": ["cpu", "cuda"], "rows": [row, …]}. "leave_out" lists implementations
that would only cost time, "also" those that take part only where they are named; "tf32": true lets products
of f32 be TF32 in all of it. "limit_ms" is its --limit-ms on a GPU where none is given.

A row has sizes b, hq, hkv, sq, sk, d, dv (hkv, sk and dv follow hq, sq and d; b is 1), features (mask
"additive" or "padding", window, blocks, dropout, precision), and lists of dtypes, passes, causal and
deterministic, which are multiplied out; without them it is f32, forward, not causal, not deterministic.
Forward always gives the same bits, so it is there once. One value may stand for a list of it in causal and
deterministic. The C++ benchmark knows no precision.

Without --suite all run that are for the device; one for none runs where it is asked for.

That is attention. A row with an "op" is another operation, with that one's sizes, dtypes and passes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.bench.kinds import AnyProblem
from tilewise.bench.lines import LARGEST_SIZE
from tilewise.bench.operations import OPERATIONS, Operation
from tilewise.bench.problem import ITEM_BYTES, MASKS, PASSES, PRECISIONS, BadInput, Problem

FOLDER = Path(__file__).parent / "suites"
# The order in which they run, what matters most first: a run may have to end early.
_FIRST = (
    *("flash-attention-grid", "vit", "llama", "decode", "ffn", "layer", "gemm", "norm", "f32", "tf32"),
    *("sparse", "masks", "deterministic", "ladder"),
)
# Names from before, which records may have and the command line takes.
RENAMED = {
    "fa3-grid": "flash-attention-grid",
    "seed-tables": "common-shapes",
    "compiled": "compiled-pytorch",
    "window": "sparse",
}
_SWITCHES = ("causal", "deterministic")
_SIZES = ("b", "hq", "hkv", "sq", "sk", "d", "dv")
_FEATURES = ("mask", "window", "blocks", "dropout", "precision")
_KEYS = {"op", *_SIZES, *_FEATURES, "dtypes", "passes", *_SWITCHES}


@dataclass(frozen=True)
class Selection:
    """What the command line asks in place of a suite's own choices; an empty one leaves them as they are."""

    dtypes: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    causal: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Suite:
    name: str
    about: str
    devices: tuple[str, ...]
    problems: tuple[AnyProblem, ...]
    also: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    tf32: bool = False
    limit_ms: float | None = None  # on a GPU, in place of the default of --limit-ms


def names(device: str | None = None) -> list[str]:
    """Suites that come with the package, or those of them that are for a device.

    >>> "quick" in names("cpu"), "flash-attention-grid" in names("cpu")
    (True, False)
    """
    found = sorted(sorted(path.stem for path in FOLDER.glob("*.json")), key=rank)
    return found if device is None else [name for name in found if device in _read(find(name))["devices"]]


def rank(name: str) -> int:
    """A suite's place in the order in which they run and are shown."""
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def about(name: str) -> str:
    """What a suite that comes with the package is for; empty for another.

    >>> about("tf32"), about("mine")
    ('f32 whose products may be TF32', '')
    """
    return str(_read(find(name)).get("about", "")) if name in names() else ""


def find(name_or_file: str) -> Path:
    """The file of a suite, whose name may be one from before."""
    name = RENAMED.get(name_or_file, name_or_file)
    for path in (Path(name_or_file), FOLDER / f"{name}.json"):
        if os.path.isfile(path):  # False, too, for what can be no file's name
            return path
    raise BadInput(f"--suite: expected a file, all, or one of {', '.join(names())}, got {name_or_file!r}")


def load(name_or_file: str, selection: Selection = Selection()) -> Suite:  # noqa: B008
    """The suite of this name or in this file."""
    path = find(name_or_file)
    read = _read(path)
    try:
        problems = [problem for row in read["rows"] for problem in expand(row, path.stem, selection)]
    except BadInput as error:
        raise BadInput(f"--suite: {path.name}: {error}") from None
    return Suite(
        name=path.stem,
        about=read.get("about", ""),
        devices=tuple(read["devices"]),
        problems=tuple(dict.fromkeys(problems)),  # a selection may make two rows the same
        also=tuple(read.get("also", ())),
        leave_out=tuple(read.get("leave_out", ())),
        tf32=read.get("tf32", False),
        limit_ms=read.get("limit_ms"),
    )


def shape(text: str, selection: Selection = Selection()) -> list[AnyProblem]:  # noqa: B008
    """The problems of one row written as "hq=8 sq=1024 d=64 window=256" or "op=gemm m=8 n=512 k=512".

    >>> [str(problem) for problem in shape("hq=8 sq=1024 d=64 window=256", Selection(causal=(True,)))]
    ['h8 s1024 d64 window=256 causal f32 forward']
    """
    row: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"--shape: expected key=value, got {word!r}")
        row[key] = _value(value)
    try:
        return list(dict.fromkeys(expand(row, "shape", selection)))
    except BadInput as error:
        raise BadInput(f"--shape: {error}") from None


def expand(row: dict[str, Any], suite: str, selection: Selection) -> Sequence[AnyProblem]:
    """One row becomes a problem for each type, pass and kind of causality."""
    op = row.get("op", Problem.op)
    if isinstance(op, str) and op in OPERATIONS:
        return _operations(row, OPERATIONS[op], suite, selection)
    if op != Problem.op:
        raise BadInput(f"op: expected one of {', '.join((Problem.op, *OPERATIONS))}, got {op!r}")
    row = {**row, **{key: [row[key]] for key in _SWITCHES if isinstance(row.get(key), bool)}}
    _check(row)
    sizes = {"b": 1, **{key: row[key] for key in _SIZES if key in row}}
    for key, same in (("hkv", "hq"), ("sk", "sq"), ("dv", "d")):
        sizes.setdefault(key, sizes[same])
    if sizes["hq"] % sizes["hkv"]:
        raise BadInput(f"hq: expected a multiple of hkv, got {sizes['hq']} over {sizes['hkv']}")
    problem = Problem(
        suite=suite,
        **sizes,
        mask=row.get("mask"),
        window=row.get("window"),
        blocks=row.get("blocks", 1.0),
        dropout=row.get("dropout", 0.0),
        precision=row.get("precision", "standard"),
    )
    return [
        replace(
            problem,
            dtype=dtype,
            direction=direction,
            causal=causal,
            deterministic=deterministic and direction != "forward",
        )
        for dtype in selection.dtypes or row.get("dtypes", ("f32",))
        for direction in selection.passes or row.get("passes", ("forward",))
        for causal in selection.causal or row.get("causal", (False,))
        for deterministic in row.get("deterministic", (False,))
    ]


def _operations(
    row: dict[str, Any], kind: type[Operation], suite: str, selection: Selection
) -> list[Operation]:
    sizes = {**kind.defaults, **{key: row[key] for key in kind.size_names() if key in row}}
    known = {"op", "dtypes", "passes", *kind.size_names()}
    for key in row:
        if key not in known:
            raise BadInput(f"expected keys among {', '.join(sorted(known))}, got {key!r}")
    for key in kind.size_names():
        if key not in sizes:
            raise BadInput(f"{kind.op}: expected {', '.join(kind.size_names())}, got no {key}")
        if key in kind.choices:
            check_each(key, [sizes[key]], kind.choices[key])
        else:
            _check_size(key, sizes[key], 1)
    check_each("dtypes", row.get("dtypes", ()), tuple(ITEM_BYTES))
    check_each("passes", row.get("passes", ()), kind.passes)
    passes = [x for x in selection.passes if x in kind.passes] if selection.passes else row.get("passes")
    return [
        kind(suite=suite, direction=direction, dtype=dtype, **sizes)
        for dtype in selection.dtypes or row.get("dtypes", ("f32",))
        for direction in (("forward",) if passes is None else passes)
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
        rows = read["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--suite: {path.name} is not a suite: {type(error).__name__}: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f"--suite: {path.name}: expected a list of rows")
    read = {"devices": ["cpu", "cuda"], **read}
    for key in ("devices", "also", "leave_out"):
        words = read.get(key, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadInput(f"--suite: {path.name}: {key}: expected a list of names, got {words!r}")
    limit = read.get("limit_ms")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0):
        raise BadInput(f"--suite: {path.name}: limit_ms: expected milliseconds, got {limit!r}")
    return read


def _check(row: dict[str, Any]) -> None:
    for key in row:
        if key not in _KEYS:
            raise BadInput(f"expected keys among {', '.join(sorted(_KEYS))}, got {key!r}")
    for key in ("hq", "sq", "d"):
        if key not in row:
            raise BadInput(f"expected at least hq, sq and d, got no {key}")
    for key in (*_SIZES, "window"):
        if key in row:
            _check_size(key, row[key], 0 if key == "window" else 1)
    for key in ("blocks", "dropout"):
        if key in row and not (isinstance(row[key], (int, float)) and 0 <= row[key] <= 1):
            raise BadInput(f"{key}: expected a number from 0 to 1, got {row[key]!r}")
    check_each("precision", [row.get("precision", "standard")], PRECISIONS)
    if row.get("mask") not in (None, *MASKS):
        raise BadInput(f"mask: expected {' or '.join(MASKS)}, got {row['mask']!r}")
    for key, known in (("dtypes", tuple(ITEM_BYTES)), ("passes", PASSES)):
        check_each(key, row.get(key, ()), known)
    for key in _SWITCHES:
        check_each(key, row.get(key, ()), (False, True))


def check_each(name: str, given: Sequence[Any], known: Sequence[Any]) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise BadInput(f"{name}: expected a list, got {given!r}")
    for value in given:
        if value not in known:
            raise BadInput(f"{name}: expected {', '.join(map(str, known))}, got {value!r}")


def _check_size(key: str, size: Any, least: int) -> None:
    if not (_whole(size) and size >= least):
        raise BadInput(f"{key}: expected {least} or above, got {size!r}")
    if size > LARGEST_SIZE:  # a record would not hold it, and no machine its tensors
        raise BadInput(f"{key}: expected at most {LARGEST_SIZE}, got {size!r}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
