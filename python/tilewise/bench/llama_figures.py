"""What docs/lab/models.md shows of Llama, drawn from the record that examples/llama/compare.py makes."""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.bench.model_figures import NOTHING, figure, of, runs_of, table, values, where
from tilewise.bench.records import Line

OURS = "tilewise"
GRAPH = "tilewise, graph"
COMPILED = "hf sdpa, compiled"
BESIDE = {COMPILED: "tilewise, beside it"}  # where it has a race of its own: what of ours is in that
THEIRS = ("hf sdpa", "hf eager", COMPILED)  # without Tilewise's attention
WIDE_SPREAD = 0.05


def section(lines: list[Line]) -> str:
    if len(lines) < 2:  # the environment alone
        return NOTHING
    rows = of(lines, suite="llama-model")
    text = [f"{where(lines)}; {rows[0]['dtype']}, batch {rows[0]['batch']}, random weights."]
    models = list(dict.fromkeys((line["model"], line["layers"]) for line in rows))
    if any(layers == 1 for _, layers in models):
        text += ["", *_one_layer_note(of(rows, layers=1))]
    decoded = [line for line in of(rows, op="decode", impl=COMPILED) if "ms" in line]
    if any("peak_mb" not in line for line in decoded):
        told = (
            f'"{COMPILED}" decodes by `generate` in this record, whose host\'s work is part of its figures.'
        )
        text += ["", told]
    if logits := of(rows, op="logits"):
        text += ["", *_logits_table(logits)]
    for model, layers in models:
        own = of(rows, model=model, layers=layers)
        name = _model_name(own[0])
        if prefills := of(own, op="prefill"):
            tokens = sorted({line["tokens"] for line in prefills})
            head = [f"{name}, prefill{runs_of(prefills)}", *(f"{n} tokens" for n in tokens)]
            text += ["", *table(head, [*_prefill_rows(prefills, tokens), *_prefill_ratios(prefills, tokens)])]
            text += _spread_note(prefills) + _skipped_note(prefills)
        if steps := of(own, op="decode"):
            title = f"{name}, decoding after {steps[0]['context']}{runs_of(steps)}"
            keys = ["ms", "tokens_a_second"] + ["peak_mb"] * any("peak_mb" in x for x in steps)
            head = [title, "ms a token", "tokens/s", "MB"][: len(keys) + 1]
            cells = [[x["impl"], *(figure(x.get(key)) for key in keys)] for x in steps]
            text += ["", *table(head, [*cells, *_decode_ratios(steps, len(keys))])]
            text += _spread_note(steps) + _skipped_note(steps)
    return "\n".join(text)


def _logits_table(rows: list[Line]) -> list[str]:
    """Of Tilewise, and of hf eager where a record has it: how far two ways of one library are apart."""
    keys = {"tilewise": ""} | ({"hf eager": "eager_"} if any("eager_same_token" in x for x in rows) else {})
    head = ["logits beside hf sdpa"]
    for impl in keys:
        head += [f"{impl}: largest difference : largest logit", "same next token"]
    said = {True: "yes", False: "no", None: "-"}
    cells = []
    for x in rows:
        cells.append([_model_name(x)])
        for whose in keys.values():
            cells[-1] += [
                figure(x.get(f"{whose}relative_difference"), 2),
                said[x.get(f"{whose}same_token")],
            ]
    return table(head, cells)


def _model_name(line: Line) -> str:
    return f"{line['model']}, {line['layers']} {'layer' if line['layers'] == 1 else 'layers'}"


def _one_layer_note(rows: list[Line]) -> list[str]:
    """What else a model of one layer has, and how much where the record says so."""
    text = 'A model of "1 layer" has the embedding and the head, too'
    each = {}
    for line in rows:
        if "layers_mb" in line:
            outside, whole = line["weights_mb"] - line["layers_mb"], line["weights_mb"]
            each[line["model"]] = f"{figure(outside)} of {figure(whole)} MB ({line['model']})"
    return [f"{text}: {', '.join(each.values())}." if each else f"{text}."]


def _prefill_rows(rows: list[Line], tokens: list[int]) -> Iterable[list[str]]:
    """Milliseconds, thousands of tokens a second, and megabytes at the highest beyond the weights."""
    for impl in values(rows, "impl"):
        cells = []
        for n in tokens:
            found = of(rows, impl=impl, tokens=n)
            if not found or "ms" not in found[0]:
                cells.append("-")
                continue
            rate = figure(found[0]["tokens_a_second"] / 1e3)
            # Records that do not say how often they ran have the memory of the call that compiled.
            compiling = "compiled" in impl and "runs" not in found[0]
            peak = figure(None if compiling else found[0].get("peak_mb"))
            cells.append(f"{figure(found[0]['ms'])} · {rate} · {peak}")
        yield [impl, *cells]


def _times_of_ours(rows: list[Line], ours: str) -> dict[str, float]:
    """The time of each of theirs over that of ours, both of one race.

    >>> lines = [{"impl": "hf sdpa", "ms": 3.0}, {"impl": "tilewise", "ms": 2.0}]
    >>> _times_of_ours(lines, "tilewise")
    {'hf sdpa': 1.5}
    """
    ms = {line["impl"]: line["ms"] for line in rows if "ms" in line}
    beside = {impl: next((x for x in (BESIDE.get(impl), ours) if x in ms), None) for impl in THEIRS}
    return {impl: ms[impl] / ms[own] for impl, own in beside.items() if own is not None and impl in ms}


def _prefill_ratios(rows: list[Line], tokens: list[int]) -> list[list[str]]:
    ratios = [_times_of_ours(of(rows, tokens=n), OURS) for n in tokens]
    if not any(ratios):
        return []
    sdpa = (x.get("hf sdpa") for x in ratios)
    best = (min(x.values(), default=None) for x in ratios)
    cells = {"hf sdpa : tilewise": sdpa, "best hf : tilewise": best}
    return [[name, *("-" if x is None else f"{x:.2f}" for x in row)] for name, row in cells.items()]


def _decode_ratios(rows: list[Line], columns: int) -> Iterable[list[str]]:
    """Of what both do in a loop, and of the best of both."""
    ours = GRAPH if of(rows, impl=GRAPH) else OURS
    plain, best = _times_of_ours(rows, OURS), _times_of_ours(rows, ours)
    rest = [""] * (columns - 1)
    if "hf sdpa" in plain:
        yield ["hf sdpa : tilewise", f"{plain['hf sdpa']:.2f}", *rest]
    if best:
        yield [f"best hf : {ours}", f"{min(best.values()):.2f}", *rest]


def _spread_note(rows: list[Line]) -> list[str]:
    """Names the lines whose runs differ by much."""
    wide = [x for x in rows if x.get("spread", 0.0) > WIDE_SPREAD]
    if not wide:
        return []
    said = (f"{_route(x)} ({x['spread']:.0%})" for x in wide)
    return ["", f"Between the quartiles lie more than {WIDE_SPREAD:.0%} of the median in: {'; '.join(said)}."]


def _skipped_note(rows: list[Line]) -> list[str]:
    """Names what did not run, and why."""
    said = [f"{_route(x)} ({x['skipped']})" for x in rows if "skipped" in x]
    return ["", f"Did not run: {'; '.join(said)}."] if said else []


def _route(line: Line) -> str:
    return f"{line['impl']} at {line['tokens']}" if "tokens" in line else line["impl"]
