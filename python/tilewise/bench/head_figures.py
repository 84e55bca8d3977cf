"""What docs/lab/wide.md shows of large head dims: every kernel and peer with its time and its error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tilewise.bench.records import Record, about, read
from tilewise.bench.summary import Race, name_of, races
from tilewise.bench.table import digits

NOTHING = "Nothing has been recorded yet."
ORDER = ("naive", "tiled", "fused", "mma", "wgmma", "wide", "torch math", "torch efficient")
LARGE = 256  # head dims above this are of interest whatever the number of heads


def section(folder: Path) -> str:
    """One head by its dim, then several heads."""
    records = [
        read(path) for name in ("common-shapes", "head-dims") if (path := folder / f"{name}.jsonl").exists()
    ]
    if not records:
        return NOTHING
    one, several = list(_races(records, one_head=True)), list(_races(records, one_head=False))
    head = f"{about(records)}: milliseconds and relative error against float64, forward."
    tables = ["\n".join(_table(of)) for of in (one, several) if of]
    return "\n\n".join([head, *tables])


def _races(records: Sequence[Record], one_head: bool) -> Iterator[Race]:
    found = []
    for record in records:
        for race in races(record.rows):
            first = race.first
            if first["op"] != "attention" or first["pass"] != "forward" or first.get("causal"):
                continue
            alone = first["b"] == first["hq"] == 1 and first["d"] >= LARGE // 2
            if alone if one_head else first["d"] > LARGE and not alone:
                found.append(race)
    yield from sorted(found, key=lambda race: (race.first["dtype"], race.first["sq"], race.first["d"]))


def _table(of: Sequence[Race]) -> Iterator[str]:
    impls = [impl for impl in ORDER if any(race.get(impl) for race in of)]
    yield f"| problem | type | {' | '.join(impls)} |"
    yield f"| --- | --- |{' ---: |' * len(impls)}"
    for race in of:
        cells = []
        for impl in impls:
            line = race.get(impl)
            cells.append(f"{digits(line['ms'])} · {line['relative_error']:.1e}" if line else "-")
        yield f"| {name_of(race.first)} | {race.first['dtype']} | {' | '.join(cells)} |"
