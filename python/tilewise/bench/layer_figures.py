"""What docs/lab/layer.md shows of products, networks, norms and layers, drawn from their suites' records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewise.bench.plots import roof_of
from tilewise.bench.records import Record, about
from tilewise.bench.summary import Race, name_of, races
from tilewise.bench.table import digits, rate

NOTHING = "Nothing has been recorded yet."
PEERS = ("torch eager", "hugging face", "torch compiled", "torch graph", "torch compiled graph")


def section(machines: Sequence[Record]) -> str:
    """A table for each machine and operation."""
    parts = []
    for record in machines:
        of = [race for race in races(record.rows) if "sizes" in race.first and race.best_ours]
        if not of:
            continue
        made = about(record.parts_of({race.first["suite"] for race in of}))
        parts.append(f"{made}: medians in milliseconds; of the roof compares with the rates of PyTorch's "
                     "large matrix product and copy, measured beside them, which are no limits; MB are what "
                     "a call allocates.")  # fmt: skip
        for op in dict.fromkeys(race.first["op"] for race in of):
            parts.append("\n".join(_table(record, op, [race for race in of if race.first["op"] == op])))
    return "\n\n".join(parts) or NOTHING


def _table(record: Record, op: str, of: Sequence[Race]) -> Iterator[str]:
    peers = [peer for peer in PEERS if any(race.get(peer) for race in of)]
    head = [op, "type", "pass", "Tilewise", "kernel", *(f"{peer.capitalize()}" for peer in peers)]
    head += ["times as fast", "rate", "of the roof", "MB, ours and PyTorch's"]
    yield f"| {' | '.join(head)} |"
    yield f"| --- | --- | --- | ---: | --- |{' ---: |' * (len(head) - 5)}"
    for race in of:
        us = race.best_ours
        assert us is not None
        found = [race.get(peer) for peer in peers]
        roof, eager = roof_of(record, us), race.get("torch eager")
        cells = [name_of(us).removeprefix(f"{op} "), us["dtype"], us["pass"], digits(us["ms"]), us["impl"]]
        cells += [digits(line["ms"] if line else None) for line in found]
        cells += [f"{race.speed_up:.2f}" if race.speed_up else "–", rate(us["tflops"])]
        cells += [f"{100 * us['tflops'] / roof[0]:.0f} % ({roof[1]})" if roof else "–"]
        plain = race.get("tilewise") or us  # a graph has its memory beforehand
        cells += [f"{digits(plain['peak_mb'])}, {digits(eager['peak_mb'] if eager else None)}"]
        yield f"| {' | '.join(cells)} |"
