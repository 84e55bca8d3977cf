"""What docs/lab/models.md shows of ViT, drawn from records; and what tables of models have in common."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from tilewise.bench import charts, timing
from tilewise.bench.charts import Chart, Series
from tilewise.bench.records import Line

RECORDS = ("vit-model", "vit-train", "llama-model")
NOTHING = "Nothing has been recorded yet."
RUNGS = ("naive", "tiled", "fused", "mma", "wgmma")
WIDTH = 768  # of ViT-B
PLAIN_WITHIN = 4  # times: what is further apart is drawn on logarithmic axes
PARTS = {"vit attention": "attention, a call", "vit model": "whole model"}


def read(folder: Path) -> dict[str, list[Line]]:
    """The lines of each record, the environment first; none where there is no such record."""
    found = {}
    for name in RECORDS:
        path = folder / f"{name}.jsonl"
        found[name] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return found


def of(lines: Iterable[Line], **wanted: object) -> list[Line]:
    return [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]


def values(lines: Iterable[Line], key: str) -> list[str]:
    """What the lines have under a key, in order and once."""
    return list(dict.fromkeys(line[key] for line in lines if key in line))


def where(lines: Sequence[Line]) -> str:
    environment = lines[0]["environment"]
    machine = environment.get("gpu") or environment.get("cpu")
    return f"{machine}, PyTorch {environment['torch']}, {environment['date'][:10]}"


def figure(value: float | None, digits: int = 3) -> str:
    """Three digits or more, without an exponent.

    >>> [figure(x) for x in (0.01234, 1.5, 123456.0, None)]
    ['0.0123', '1.50', '123456', '-']
    """
    if value is None:
        return "-"
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, places)}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def in_order(rows: Sequence[Line]) -> list[str]:
    """Whom the lines are of: PyTorch, the rungs and what is made of them; then others that have a time."""
    known = [name for name in ("torch", "torch + auto", *RUNGS, "auto", "layer") if of(rows, impl=name)]
    return known + [name for name in values((x for x in rows if "ms" in x), "impl") if name not in known]


def runs_of(lines: Iterable[Line]) -> str:
    """How often the lines' calls were run, to follow a title; nothing where they do not say.

    >>> runs_of([{"runs": 3}, {"runs": 20}, {"runs": 20}]), runs_of([{"runs": 20}]), runs_of([{}])
    (' (20 or 3 runs)', ' (20 runs)', '')
    """
    counts = sorted({line["runs"] for line in lines if "runs" in line}, reverse=True)
    if not counts:
        return ""
    *more, least = map(str, counts)
    return f" ({', '.join(more)} or {least} runs)" if more else f" ({least} runs)"


# ViT-B/16 over the size of its images


def scaling_section(lines: list[Line]) -> str:
    if len(lines) < 2:  # the environment alone
        return NOTHING
    rows = of(lines, suite="vit-model")
    tokens = sorted({line["tokens"] for line in rows})
    ratio = tokens[-1] / tokens[0]
    text = [
        f"{where(lines)}; batch {rows[0]['batch']}, {rows[0]['depth']} layers, milliseconds. "
        f"From {tokens[0]} to {tokens[-1]} tokens N² grows {ratio**2:.1f} times, N {ratio:.1f} times.",
        "",
        _inputs_note(of(rows, op="vit attention")),
    ]
    pixels = {line["tokens"]: line["pixels"] for line in rows}
    for dtype in values(rows, "dtype"):
        for op, title in PARTS.items():
            own = of(rows, dtype=dtype, op=op)
            head = [
                f"{title}, {dtype}{runs_of(own)}",
                *(f"{pixels[n]} px, {n} tokens" for n in tokens),
                "growth",
                f"torch : it at {tokens[-1]}",
            ]
            text += ["", *table(head, _scaling_rows(own, tokens))]
    text += ["", "![Time over tokens, beside N²](../vit-scaling.svg)"]
    return "\n".join(text)


def _inputs_note(attention: list[Line]) -> str:
    """Where attention's inputs are when it begins; lines that rotate them say how many sets there are."""
    timed = [line for line in attention if "ms" in line]
    if timed and all(line.get("sets", 1) > 1 for line in timed):
        return "Attention's inputs are rotated, so that none is in the L2 when its turn comes."
    size = ""
    if attention:
        least = min(attention, key=lambda line: line["tokens"])
        megabytes = 3 * least["batch"] * least["tokens"] * WIDTH * 2e-6
        size = f" ({megabytes:.0f} MB in bf16 at {least['pixels']} px)"
    return (
        f"Attention's inputs are the same in every call, so that those which fit stay in the L2{size};\n"
        "the suite `vit` in `README.md` has the figures of inputs that do not."
    )


def _scaling_rows(rows: list[Line], tokens: list[int]) -> Iterable[list[str]]:
    def ms(impl: str, n: int) -> float | None:
        found = of(rows, impl=impl, tokens=n)
        return found[0].get("ms") if found else None

    for impl in in_order(rows):
        times = [ms(impl, n) for n in tokens]
        first, last, peer = times[0], times[-1], ms("torch", tokens[-1])
        growth = f"{last / first:.1f} times" if first and last else "-"
        yield [impl, *map(figure, times), growth, f"{peer / last:.2f}" if peer and last else "-"]


def scaling_plot(lines: list[Line]) -> str:
    """A row for attention and one for the model in each type: all on the left, all but naive on the right."""
    rows = [line for line in of(lines, suite="vit-model") if "ms" in line]
    impls = in_order(rows)
    others = [name for name in impls if name != "naive"]
    drawn = []
    for dtype in values(rows, "dtype"):
        for op, title in PARTS.items():
            part = of(rows, dtype=dtype, op=op)
            for names, note in ((impls, ""), (others, ", without naive")):
                if any(line["impl"] in names for line in part):
                    drawn.append(_scaling_chart(f"{title}, {dtype}{note}", part, names))
    return charts.grid(drawn, 2, impls, cell=(420, 290))


def _scaling_chart(title: str, rows: list[Line], impls: Sequence[str]) -> Chart:
    """Time over tokens, on logarithmic axes unless all are within a few times of each other."""
    series = []
    for impl in impls:
        points = sorted((float(line["tokens"]), float(line["ms"])) for line in of(rows, impl=impl))
        if points:
            joined, dashed = impl != "auto", impl.startswith("torch")  # auto: rings around a rung's marks
            series.append(Series(impl, tuple(points), joined=joined, dashed=dashed))
    tokens = sorted({x for one in series for x, _ in one.points})
    last = [one.points[-1][1] for one in series]
    log = max(last) > PLAIN_WITHIN * min(last)
    # N² from the slowest's first point on, of which a plain axis has a part; on logarithmic axes, where it
    # would lie on naive's line, beside that.
    begin = max(one.points[0][1] for one in series) * (1.6 if log else 1)
    steps = [tokens[0] + (tokens[-1] - tokens[0]) * n / 24 for n in range(25)]
    line = [(at, begin * (at / tokens[0]) ** 2) for at in steps]
    times = [y for one in series for _, y in one.points]
    x = charts.axis("tokens", tokens, log, tokens)
    y = charts.axis("ms", [*times, line[-1][1]] if log else times, log)
    rule = tuple(point for point in line if point[1] <= y.high)
    return Chart(title, x, y, tuple(series), (("N²", rule),))


# Training


def training_section(lines: list[Line]) -> str:
    if len(lines) < 2:  # the environment alone
        return NOTHING
    epochs, steps = (of(lines, op=op) for op in ("epoch", "steps"))
    about, images = lines[1], ""
    if "data" in about:
        counts = f"{about['training_images']:,} images and {about['test_images']:,} to test"
        images = f"{about['data']}, {counts}; "
    text = [f"{where(lines)}; {images}batches of {about['batch']}, {about['dtype']}."]
    if epochs:
        head = [
            "attention",
            "epochs",
            "accuracy",
            "loss",
            "seconds an epoch",
            "images/s, inference",
            "what ran",
        ]
        text += ["", *table(head, _epoch_rows(lines, epochs))]
        text += ["", *said] if (said := _beside_sdpa(lines, epochs)) else []
    if steps:
        rows = [
            [x["impl"], figure(x.get("ms")), figure(x.get("loss"), 5), x.get("skipped") or passes(x)]
            for x in steps
        ]
        count = max(x.get("steps", 0) for x in steps)
        timed = max(x.get("timed", x.get("steps", 3) - 3) for x in steps)  # the first three never were
        head = ["kernel", "ms a step", f"loss after {count}", "what ran, or why not"]
        text += ["", *table(head, rows)]
        told = f"{timed} steps were timed, from the 4th on, the time of their host included"
        text += ["", f"{told}: epochs are the better measure."]
    return "\n".join(text)


def _epoch_rows(lines: list[Line], epochs: list[Line]) -> Iterable[list[str]]:
    for impl in values(epochs, "impl"):
        own = of(epochs, impl=impl)
        last = own[-1]
        seconds = _epoch_seconds(own)
        infer = (of(lines, op="infer", impl=impl) or [{}])[0]
        speed = [figure(infer.get("images_a_second")), passes(infer) or "-"]
        yield [
            impl,
            str(last["epoch"]),
            f"{last['accuracy']:.2%}",
            figure(last["loss"]),
            figure(seconds),
            *speed,
        ]


def _epoch_seconds(epochs: list[Line]) -> float:
    return statistics.median(line["seconds"] for line in epochs[1:] or epochs)  # the first one warms up


def passes(line: Line) -> str:
    """The kernels that ran; nothing where a line does not say.

    >>> passes({"kernels": {"forward": "wgmma", "backward": "mma"}})
    'wgmma forward, mma backward'
    >>> passes({"kernels": {"forward": "mma", "backward": "mma"}}), passes({})
    ('mma forward and backward', '')
    """
    kernels = line.get("kernels", {})
    if len(kernels) > 1 and len(set(kernels.values())) == 1:
        return f"{next(iter(kernels.values()))} {' and '.join(kernels)}"
    return ", ".join(f"{kernel} {name}" for name, kernel in kernels.items())


def _beside_sdpa(lines: list[Line], epochs: list[Line]) -> list[str]:
    """A ratio is printed where it is further from 1 than the turns of either are from each other."""
    ours, theirs = (of(epochs, impl=impl) for impl in ("auto", "sdpa"))
    if not (ours and theirs):
        return []
    left, right = _epoch_seconds(ours), _epoch_seconds(theirs)
    ratio, seconds = left / right, f"{figure(left)} and {figure(right)} s"
    if _is_noise(ratio, max(map(_epoch_spread, (ours, theirs)))):
        text = f"An epoch takes as long with auto as with SDPA, within noise ({seconds})"
    else:
        text = f"An epoch with auto takes {ratio:.2f} times as long as with SDPA ({seconds})"
    infers = [x for impl in ("auto", "sdpa") for x in of(lines, op="infer", impl=impl)]
    if len(infers) == 2 and all("spread" in x for x in infers):  # one turn of each would say nothing
        ratio = infers[0]["images_a_second"] / infers[1]["images_a_second"]
        spread = max(x["spread"] for x in infers)
        fast = "as fast, within noise" if _is_noise(ratio, spread) else f"{ratio:.2f} times as fast"
        turns = f"medians of {infers[0]['turns']} turns, which spread by {spread:.2%} at most"
        text += f"; inference is {fast} ({turns})"
    return [f"{text}."]


def _is_noise(ratio: float, spread: float) -> bool:
    """Whether two differ by no more than the runs of one do.

    >>> [_is_noise(ratio, 0.03) for ratio in (0.9, 0.98, 1.02, 1.1)]
    [False, True, True, False]
    """
    return max(ratio, 1 / ratio) <= 1 + spread


def _epoch_spread(epochs: list[Line]) -> float:
    """Between the quartiles, over the median; of the epochs that count."""
    seconds = [line["seconds"] for line in epochs[1:] or epochs]
    return timing.summary(seconds).spread if len(seconds) > 1 else 0.0
