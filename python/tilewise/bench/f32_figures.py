"""What docs/lab/mma_f32.md shows of f32: tensor cores beside PyTorch's efficient kernel."""

from __future__ import annotations

from pathlib import Path

from tilewise.bench.records import Line, Record, about, read
from tilewise.bench.summary import Race, races, shape_of

NOTHING = "Nothing has been recorded yet."
PEER = "torch efficient"
COLUMNS = ("wgmma", "mma", PEER)
OTHERS = ("fused", "wide")  # of ours, which take what those do not
SIZES = ("b", "hq", "hkv", "sq", "sk", "d", "dv", "causal", "features")


def section(folder: Path) -> str:
    """A row a problem: forward, forward where TF32 is allowed, backward, and how many times as fast."""
    paths = [folder / f"{name}.jsonl" for name in ("f32", "tf32")]
    if not paths[0].exists():
        return NOTHING
    found = [read(path) for path in paths if path.exists()]
    record, others = found[0], found[1:]
    forward, backward = (_of(record, name) for name in ("forward", "backward"))
    allowed = _of(others[0], "forward") if others else {}
    if not forward:
        return NOTHING
    head = (
        f"{about(found)}: ms of whole calls, those of a race in turns in one process; "
        f"then {PEER}'s time over that of our fastest kernel."
    )
    heads = [*COLUMNS, *(f"TF32: {impl}" for impl in COLUMNS[:2])]
    heads += [f"backward: {impl}" for impl in ("mma", " or ".join(OTHERS), PEER)]
    heads += ["forward", "TF32", "backward", "both passes"]
    lines = [head, "", f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for key, race in forward.items():
        tf32, back = allowed.get(key), backward.get(key)
        cells = [_ms(_line(race, impl)) for impl in COLUMNS]
        cells += [_ms(_line(tf32, impl)) for impl in COLUMNS[:2]]
        cells += [_ms(line) for line in (_line(back, "mma"), _best(back, OTHERS), _line(back, PEER))]
        cells += [_gain(race), _gain(tf32), _gain(back), _gain(race, back)]
        name = shape_of(race.first) + (" causal" if race.first["causal"] else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(record: Record, direction: str) -> dict[tuple[object, ...], Race]:
    """Its races of one pass, by their sizes."""
    return {
        tuple(race.first[key] for key in SIZES): race
        for race in races(record.rows)
        if race.first["pass"] == direction
    }


def _line(race: Race | None, impl: str) -> Line | None:
    return race.get(impl) if race else None


def _best(race: Race | None, impls: tuple[str, ...]) -> Line | None:
    lines = [line for impl in impls if (line := _line(race, impl))]
    return min(lines, key=lambda line: line["ms"], default=None)


def _ms(line: Line | None) -> str:
    return f"{line['ms']:.3f}" if line else "-"


def _gain(*of: Race | None) -> str:
    """The peer's time over our best, of all together."""
    ours = theirs = 0.0
    for race in of:
        best, peer = race.best_ours if race else None, _line(race, PEER)
        if not best or not peer:
            return "-"
        ours, theirs = ours + best["ms"], theirs + peer["ms"]
    return f"{theirs / ours:.2f}"
