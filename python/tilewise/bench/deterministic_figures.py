"""What docs/lab/mma.md shows of deterministic gradients: their time beside that of the default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilewise.bench.records import Line, about, read
from tilewise.bench.summary import Race, name_of, races

NOTHING = "Nothing has been recorded yet."
WORD = "deterministic=true"
KERNEL, PEER = "mma", "torch flash"


def section(folder: Path) -> str:
    """A row a problem: both times of the kernel and of its peer."""
    path = folder / "deterministic.jsonl"
    if not path.exists():
        return NOTHING
    record = read(path)
    pairs = list(_pairs(races(record.rows)))
    if not pairs:
        return NOTHING
    head = f"{about([record])}: milliseconds of backward by default and deterministic."
    table = [f"| bf16 | `{KERNEL}` | | | {PEER} | | |", "| --- |" + " ---: |" * 6]
    for plain, same in pairs:
        cells = [cell for impl in (KERNEL, PEER) for cell in _cells(plain.get(impl), same.get(impl))]
        table.append(f"| {name_of(plain.first)} | {' | '.join(cells)} |")
    return "\n".join([head, "", *table])


def _pairs(of: list[Race]) -> Iterator[tuple[Race, Race]]:
    """Races of one problem without and with the word."""
    plain = {_rest(race.first): race for race in of if WORD not in race.first["features"].split()}
    for race in of:
        if WORD in race.first["features"].split() and (other := plain.get(_rest(race.first))):
            yield other, race


def _rest(line: Line) -> tuple[object, ...]:
    features = " ".join(word for word in line["features"].split() if word != WORD)
    return features, *(
        line[key] for key in ("pass", "dtype", "b", "hq", "hkv", "sq", "sk", "d", "dv", "causal")
    )


def _cells(plain: Line | None, same: Line | None) -> tuple[str, str, str]:
    by_default = f"{plain['ms']:.3f}" if plain else "-"
    repeated = f"{same['ms']:.3f}" if same else "-"
    return by_default, repeated, f"{same['ms'] / plain['ms']:.2f}" if plain and same else "-"
