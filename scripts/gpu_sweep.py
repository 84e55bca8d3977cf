"""Times candidates for a tuning table on this GPU and leaves a record of them: `gpu-sweep mma_backward`."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpu_driver import find_gpu
from gpu_record import STAGE, Record, check_stage

NAMES = ("mma", "mma_backward", "mma_f32", "mma_f32_backward")  # programs are bench/sweep_*.cu
SHAPE = ("d", "sq", "causal", "parts")  # f32 has a table for numbers in two parts and one for those in one


def ranking(lines: list[dict[str, Any]]) -> list[str]:
    """A line a shape: the table's row beside the fastest candidate."""
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        shapes[tuple(line.get(key) for key in SHAPE)].append(line)
    found = []
    for (d, s, causal, parts), candidates in shapes.items():
        best = min(candidates, key=lambda line: line["ms"])
        own = next((line for line in candidates if line["in_table"]), None)
        shape = f"d {d}, s {s}{', causal' if causal else ''}{f', parts {parts}' if parts else ''}"
        mine = f"{own['tflops']:.0f} TFLOP/s, {own['ms'] / best['ms'] - 1:.1%} behind" if own else "no row"
        found.append(f"{shape}: {mine}; the fastest {best['tflops']:.0f}, {name_of(best)}")
    return found


def name_of(line: dict[str, Any]) -> str:
    """How a candidate is cut, in words: counts, then what it has."""
    own = list(line)[list(line).index("causal") + 1 : list(line).index("in_table")]
    counts = [f"{key} {line[key]}" for key in own if type(line[key]) is int and key != "parts"]
    return ", ".join([*counts, *(key for key in own if line[key] is True)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-sweep", description=__doc__)
    parser.add_argument("name", choices=NAMES, help="which sweep")
    parser.add_argument("only", nargs="*", type=int, help="a head dim, or a head dim and a length")
    parser.add_argument("--out", type=Path, default=Path("results"), help="where records go (results)")
    options = parser.parse_args()
    check_stage()
    program = STAGE / "bin" / f"sweep_{options.name}"
    if not program.exists():
        raise SystemExit(f"{program} is not there: run `make stage SWEEPS={options.name}`")
    gpu = find_gpu()
    record = Record(options.out / gpu.slug / f"{options.name.replace('_', '-')}-sweep.jsonl", gpu)
    lines = []
    with subprocess.Popen([program, *map(str, options.only)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        for text in running.stdout:
            lines.append(json.loads(text))
            record.add(lines[-1])
    print("\n".join(ranking(lines)))
    if running.returncode == 0 and not options.only:
        record.add({"finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")})
    return running.returncode


if __name__ == "__main__":
    raise SystemExit(main())
