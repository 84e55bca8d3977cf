"""What docs/text_models.md shows of random models, drawn from the record of bench/text_models.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tilewise.bench.model_figures import NOTHING, figure, of, table, where
from tilewise.bench.records import Line


def section(folder: Path) -> str:
    path = folder / "text-models.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(lines) < 2:  # the environment alone
        return NOTHING
    about = lines[0]["environment"]
    text = [f"{where(lines)}, transformers {about['transformers']}; random weights of seed {about['seed']}."]
    embed = of(lines, model="minilm")
    if rows := [x for x in embed if "from_eager" in x]:
        title = f"MiniLM's shape, {rows[0]['dtype']}, {rows[0]['sentences']} sentences"
        cells = [[x["impl"], figure(x["ms"]), _distance(x["from_eager"])] for x in rows]
        text += ["", *table([title, "ms", "largest difference from eager"], cells)]
    if rows := of(embed, impl="c++"):
        head = ["the same in C++, on", "ms", "largest difference from Python", "kernels"]
        cells = [[x["device"], figure(x["ms"]), _distance(x["from_python"]), _kernels(x)] for x in rows]
        text += ["", *table(head, cells)]
    if rows := of(lines, model="smollm2"):
        title = f"SmolLM2's shape, prompt of {rows[0]['prompt']}"
        head = [title, "ms to the first token", "tokens/s", "tokens as eager's"]
        text += ["", *table(head, _generated(rows))]
    return "\n".join(text)


def _distance(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _kernels(line: Line) -> str:
    return ", ".join(f"{operation}: {kernel}" for operation, kernel in line["kernels"].items())


def _generated(rows: Iterable[Line]) -> Iterable[list[str]]:
    for x in rows:
        same = f"{x['as_eager']} of {x['tokens']}"
        yield [f"{x['impl']}, {x['dtype']}", figure(x["prompt_ms"]), figure(x["tokens_a_second"]), same]
