"""What docs/lab/wgmma.md and docs/lab/mma.md show of FlashAttention's grid: a kernel beside its peer."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from pathlib import Path

from tilewise.bench.records import about, read
from tilewise.bench.summary import Race, races

NOTHING = "Nothing has been recorded yet."


def section(folder: Path, kernel: str, peer: str) -> str:
    """TFLOP/s of both, by head dim and length, for each pass that the kernel has."""
    path = folder / "flash-attention-grid.jsonl"
    if not path.exists():
        return NOTHING
    record = read(path)
    found = [race for race in races(record.rows) if race.get(kernel)]
    both = [race for race in found if race.get(peer) and race.first["dtype"] == "bf16"]
    passes = [name for name in ("forward", "backward") if any(race.first["pass"] == name for race in both)]
    product = record.rate("gemm", "bf16", "tflops")
    head = (
        f"{about([record])}: TFLOP/s of `{kernel}` and of {peer}, in turns in one process; "
        "bf16, 16,384 tokens of hidden size 2048"
    )
    head += f"; plain matrix products reached {product:.0f}." if product else "."
    tables = [
        "\n".join(_table(kernel, peer, name, [r for r in both if r.first["pass"] == name])) for name in passes
    ]
    means = f"{_means(kernel, peer, passes, both)}."
    return "\n\n".join([head, *tables, means, *_f16(kernel, found)]) if tables else NOTHING


def _means(kernel: str, peer: str, passes: list[str], both: list[Race]) -> str:
    """The kernel's rate over the peer's in the geometric mean over all shapes of a pass."""
    found = []
    for name in passes:
        ratios = [
            them["ms"] / us["ms"]
            for race in both
            if race.first["pass"] == name and (us := race.get(kernel)) and (them := race.get(peer))
        ]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        found.append(f"{name} {mean:.3f} over {len(ratios)} shapes, {min(ratios):.2f} to {max(ratios):.2f}")
    return f"{kernel} : {peer} in the geometric mean: {'; '.join(found)}"


def _f16(kernel: str, found: list[Race]) -> Iterator[str]:
    """How long f16 takes on the shapes that were run in both types."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for race in found:
        shape = tuple(race.first[key] for key in ("pass", "b", "hq", "sq", "d", "causal"))
        line = race.get(kernel)
        if line:
            times.setdefault(shape, {})[race.first["dtype"]] = line["ms"]
    ratios = [of["f16"] / of["bf16"] for of in times.values() if {"f16", "bf16"} <= set(of)]
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        yield (
            f"f16 takes {mean:.3f} times as long as bf16, {min(ratios):.3f} to {max(ratios):.3f} "
            f"over {len(ratios)} of these shapes."
        )


def _table(kernel: str, peer: str, name: str, of: list[Race]) -> Iterator[str]:
    lengths = sorted({race.first["sq"] for race in of})
    yield f"| {name} | {' | '.join(map(str, lengths))} | {kernel} : {peer} |"
    yield f"| --- |{' ---: |' * (len(lengths) + 1)}"
    for dim, causal in sorted({(race.first["d"], race.first["causal"]) for race in of}):
        row = {
            race.first["sq"]: race for race in of if (race.first["d"], race.first["causal"]) == (dim, causal)
        }
        cells, ratios = [], []
        for length in lengths:
            us, them = (row[length].get(impl) if length in row else None for impl in (kernel, peer))
            if us and them:
                cells.append(f"{us['tflops']:.0f}, {them['tflops']:.0f}")
                ratios.append(us["tflops"] / them["tflops"])
            else:
                cells.append("-")
        mean = exp(sum(map(log, ratios)) / len(ratios))
        spread = f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        yield f"| {dim}{', causal' if causal else ''} | {' | '.join(cells)} | {spread} |"
