"""What docs/lab/mma.md shows of ncu's counters: a column a problem, FlashAttention-2 in brackets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.bench.model_figures import NOTHING, where

KERNEL, PEER = "mma", "torch flash"
Figures = dict[str, float]


def _share(key: str) -> Callable[[Figures], float]:
    return lambda figures: figures[key]


# A row: what it is called, of a kernel's figures, digits.
ROWS: tuple[tuple[str, Callable[[Figures], float], int], ...] = (
    ("tensor pipe, %", _share("tensor pipe"), 0),
    ("instructions for one of the tensor pipe's", lambda f: f["instructions"] / f["tensor instructions"], 1),
    ("issue slots, %", _share("issue slots"), 0),
    ("L1 and shared memory, %", _share("L1 and shared memory"), 0),
    ("exponentials' pipe, %", _share("exponentials' pipe"), 0),
    ("conflicts, % of accesses", lambda f: 100 * f["bank conflicts"] / f["accesses of shared memory"], 1),
    ("occupancy, %", _share("occupancy"), 0),
    ("registers a thread", _share("registers a thread"), 0),
    ("stalled for a fixed latency", _share("stalled for a fixed latency"), 2),
    ("stalled for an arithmetic pipe", _share("stalled for an arithmetic pipe"), 2),
    ("stalled for shared memory", _share("stalled for shared memory"), 2),
    ("stalled for memory", _share("stalled for memory (L2 or beyond)"), 2),
    ("stalled at barriers", _share("stalled at barriers"), 2),
)


def section(folder: Path) -> str:
    path = folder / "mma-profile.jsonl"
    if not path.exists():
        return NOTHING
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    about = f"{where(lines)}; {PEER} in brackets. Stalls are warps an issue."
    measured = [line for line in lines if line.get("op") == "profile"]
    tables = [
        _table(
            f"{dtype}, {direction}",
            [line for line in measured if (line["dtype"], line["direction"]) == (dtype, direction)],
        )
        for dtype, direction in dict.fromkeys((line["dtype"], line["direction"]) for line in measured)
    ]
    return "\n\n".join([about, *tables])


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    problems = dict.fromkeys((row["b"], row["hq"], row["sq"], row["d"]) for row in rows)
    of = {((row["b"], row["hq"], row["sq"], row["d"]), row["impl"]): row["figures"] for row in rows}
    names = [f"b{b} h{h} s{s} d{d}" for b, h, s, d in problems]
    lines = [f"| {title} | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for name, value, digits in ROWS:
        cells = []
        for problem in problems:
            ours, theirs = (_text(of.get((problem, impl)), value, digits) for impl in (KERNEL, PEER))
            cells.append(f"{ours} ({theirs})" if theirs else ours or "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(figures: Figures | None, value: Callable[[Figures], float], digits: int) -> str:
    """Empty where ncu did not say."""
    try:
        return f"{value(figures):.{digits}f}" if figures else ""
    except (KeyError, ZeroDivisionError):
        return ""
