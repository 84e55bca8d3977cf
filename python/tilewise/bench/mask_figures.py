"""What docs/lab/mma.md shows of masks and dropout: times of kernels and peers, the plain call beside them."""

from __future__ import annotations

from pathlib import Path

from tilewise.bench.records import about, read
from tilewise.bench.summary import name_of, races

NOTHING = "Nothing has been recorded yet."
IMPLS = ("mma", "wgmma", "torch cudnn", "torch efficient", "torch flash")


def section(folder: Path) -> str:
    """A table a pass, a row a problem, in microseconds."""
    path = folder / "masks.jsonl"
    if not path.exists():
        return NOTHING
    record = read(path)
    found = [race for race in races(record.rows) if any(race.get(impl) for impl in IMPLS)]
    if not found:
        return NOTHING
    head = f"{about([record])}: µs of a call, in turns in one process."
    tables = []
    for direction in ("forward", "backward"):
        of = [race for race in found if race.first["pass"] == direction]
        impls = [impl for impl in IMPLS if any(race.get(impl) for race in of)]
        if not of:
            continue
        lines = [f"| {direction} | {' | '.join(impls)} |", f"| --- |{' ---: |' * len(impls)}"]
        for race in of:
            cells = [f"{1e3 * line['ms']:.0f}" if (line := race.get(impl)) else "-" for impl in impls]
            lines.append(f"| {name_of(race.first)}, {race.first['dtype']} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join([head, *tables])
