"""What docs/lab/mma.md shows of the problems that FlashAttention-2 is faster at."""

from __future__ import annotations

from pathlib import Path

from tilewise.bench.records import days, read
from tilewise.bench.summary import Race, name_of, races

NOTHING = "Nothing has been recorded yet."
KERNEL, PEER = "mma", "torch flash"
SUITES = ("flash-attention-grid", "head-dims", "llama", "vit", "decode", "masks", "common-shapes")
LEAST = 1.01  # nearer ones are as fast


def section(folder: Path) -> str:
    """A row a problem, those of one suite together."""
    found = {name: read(path) for name in SUITES if (path := folder / f"{name}.jsonl").exists()}
    both = [(name, race) for name, record in found.items() for race in races(record.rows) if _ratio(race)]
    if not both:
        return NOTHING
    behind = [(suite, race, ratio) for suite, race in both if (ratio := _ratio(race)) and ratio >= LEAST]
    ran = days(found[name] for name in {suite for suite, _ in both})
    about = f"Of {len(both)} problems that both ran ({ran}) `{KERNEL}` takes more than 1 % longer in "
    about += str(len(behind))
    lines = [f"{about}; ms.", "", f"| suite | | pass | type | `{KERNEL}` | {PEER} | times as long |"]
    lines.append("| --- | --- | --- | --- | ---: | ---: | ---: |")
    for suite, race, ratio in behind:
        us, them = (race.get(impl) for impl in (KERNEL, PEER))
        assert us and them
        first = race.first
        words = f"| {suite} | {name_of(first)} | {first['pass']} | {first['dtype']}"
        lines.append(f"{words} | {us['ms']:.3f} | {them['ms']:.3f} | {ratio:.2f} |")
    return "\n".join(lines if behind else [f"{about}."])


def _ratio(race: Race) -> float | None:
    us, them = race.get(KERNEL), race.get(PEER)
    return us["ms"] / them["ms"] if us and them else None
