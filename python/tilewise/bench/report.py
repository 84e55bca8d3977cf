"""The HTML report: one file, nothing fetched, light and dark, readable on a phone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tilewise.bench import charts, compare, plots, suites, summary
from tilewise.bench import report_tables as tables
from tilewise.bench.compare import Comparison
from tilewise.bench.records import Record, days
from tilewise.bench.summary import SLOW_KERNELS, Race, races
from tilewise.bench.table import digits, machine, rates
from tilewise.bench.words import type_of, type_words

_FOLDER = Path(__file__).parent


def page(records: Sequence[Record], earlier: Sequence[Record] = (), command: str = "") -> str:
    """The report of some records, one part a machine; beside an earlier run where one is given.

    `command` is what made the page.
    """
    machines = summary.by_machine(records)
    comparisons: Sequence[Comparison | None] = [None] * len(machines)
    if earlier:
        comparisons = compare.against(machines, summary.by_machine(earlier))
    light = f"{charts.INK[False]}{charts.variables(False)}--page:#f5f7fa;"
    dark = f"{charts.INK[True]}{charts.variables(True)}--page:#0e1218;"
    names = " and ".join(record.machine for record in machines)
    css = (_FOLDER / "report.css").read_text() + tables.column_names()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>Tilewise on {escape(names)}</title><link rel="icon" href="data:,"><style>'
        f":root{{{light}{charts.FONT}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{charts.CHART_CSS}{css}</style></head><body><main>"
        + "".join(_machine(*pair) for pair in zip(machines, comparisons, strict=True))
        + _method(command)
        + f"</main><script>{(_FOLDER / 'report.js').read_text()}</script></body></html>\n"
    )


def _machine(record: Record, comparison: Comparison | None) -> str:
    of = races(record.rows)
    if not of:  # somebody looked at kernels there, and measured nothing
        return f"<h1>Tilewise on {escape(record.machine)}</h1>{tables.counters(record)}"
    commit = record.environment.get("commit")
    made = [machine(record.environment), *([f"commit {commit}"] if commit else [])]
    parts = [
        f"<h1>Tilewise on {escape(record.machine)}</h1>",
        f'<p class="soft">{escape(", ".join(map(str, made)))}; '
        f"{escape(days(record.parts_of({race.first['suite'] for race in of})))}</p>",
        _standing(record, of),
        tables.comparison_section(comparison),
        _ladder(of),
        _peers(of),
        _growth(of),
        _roofline(record, of),
        _exactness(of),
        tables.counters(record),
        tables.rows_section(of, comparison),
        tables.download(record, comparison),
        _environment(record),
    ]
    return "".join(parts)


# At a glance


def _standing(record: Record, of: Sequence[Race]) -> str:
    kinds = summary.by_kind(of)
    parts = []
    if not kinds:  # nothing to stand beside
        parts.append(tables.said("conclusion", summary.conclusion(record)[:1]))
    for what in dict.fromkeys(what for what, _, _ in kinds):
        cards = [
            (f"{one.median:.2f}×", f"{type_words(dtype)} {direction}, {_ahead(one)}", one.median < 1)
            for (kind, dtype, direction), one in kinds.items()
            if kind == what
        ]
        parts.append(f"<h3>{what}, median speed against the fastest peer</h3>{_cards(cards)}")
    parts.append(tables.said("behind", summary.behind(of)))
    said = [summary.use(of), summary.exactness(of)]
    parts.append(tables.said("conclusion", [*said, *([busy] if (busy := summary.busy(record)) else [])]))
    if machine_cards := _machine_cards(record, of):
        parts.append(_cards(machine_cards))
    return "".join(parts)


def _ahead(one: summary.Standing) -> str:
    if one.median >= 1:
        return f"ahead in {one.faster} of {one.count}"
    return f"behind in {one.slower} of {one.count}"


def _cards(cards: Sequence[tuple[str, str, bool]]) -> str:
    inside = "".join(
        f'<div class="card{" late" if late else ""}"><b>{escape(figure)}</b>'
        f'<span class="soft">{escape(words)}</span></div>'
        for figure, words, late in cards
    )
    return f'<div class="cards">{inside}</div>'


def _machine_cards(record: Record, of: Sequence[Race]) -> list[tuple[str, str, bool]]:
    """Our fastest kernels beside each measured rate, at best; the machine's copy; the error in f32."""
    best = [race.best_ours for race in of if race.best_ours]
    highest: dict[str, float] = {}
    for line in best:
        if (what := line.get("yardstick")) and line.get("percent_of_peak"):
            highest[what] = max(highest.get(what, 0.0), line["percent_of_peak"])
    cards = [(f"{percent / 100:.2f}×", f"{what}, at best", False) for what, percent in highest.items()]
    if record.copy_rate:
        cards.append((f"{digits(record.copy_rate)} GB/s", "copy, measured", False))
    errors = [line["error"] for line in best if line.get("error") and type_of(line) == "f32"]
    if errors:
        cards.append((f"{max(errors):.1e}", "largest f32 error", False))
    return cards


# Pictures


def _ladder(of: Sequence[Race]) -> str:
    drawings = plots.ladders(of)
    if not drawings:
        return ""
    panels = "".join(f'<div class="panel">{svg}</div>' for svg in drawings)
    return (
        "<h2>The ladder</h2><p>Every kernel and peer on the problem that most of them can compute, "
        f'slowest first. Longer is better.</p><div class="panels large">{panels}</div>'
    )


def _peers(of: Sequence[Race]) -> str:
    drawings = [plots.against_peers(of, width) for width in (1100, 340)]
    if not all(drawings):
        return ""
    names = plots.order({race.best_ours["impl"] for race in of if race.best_ours and race.speed_up})
    broad, narrow = drawings
    return (
        "<h2>Against the peers</h2><p>Each mark is a problem: the time of the fastest peer divided by that "
        "of our fastest kernel. To the right of the line Tilewise is faster. The bar is the median; the "
        "number at the right is its value.</p>"
        f'{charts.legend(names)}<div class="wide"><div class="broad">{broad}</div>'
        f'<div class="narrow">{narrow}</div></div>'
    )


def _growth(of: Sequence[Race]) -> str:
    groups = plots.growths(of)
    if not groups:
        return ""
    in_order = list(dict.fromkeys(group.suite for group in groups))
    impls = plots.order({impl for group in groups for impl in group.impls})
    slow = any(impl in SLOW_KERNELS for impl in impls)
    panels = "".join(_growth_panel(group) for group in groups)
    present = [metric for metric in plots.METRICS if f'data-metric="{metric.key}"' in panels]
    buttons = "".join(
        f'<button type="button" data-metric-choice="{metric.key}" aria-pressed="false">'
        f"{metric.title}</button>"
        for metric in present
    )
    options = "".join(
        f'<option data-about="{escape(suites.about(suite), quote=True)}">{escape(suite)}</option>'
        for suite in in_order
    )
    choice = f"<label>suite <select>{options}</select></label>" if len(in_order) > 1 else ""
    box = '<label><input type="checkbox" checked> show the slowest kernels</label>' if slow else ""
    return (
        "<section data-growth><h2>How it grows</h2><p>Each panel is a family of problems that differ in one "
        "size. Both axes are logarithmic. Point at a mark to see its figures.</p>"
        f'<div class="tools">{buttons}</div><div class="tools">{choice}{box}</div><p class="soft about"></p>'
        f'{charts.legend(impls)}<div class="panels">{panels}</div></section>'
    )


def _growth_panel(group: plots.Growth) -> str:
    slow = [impl for impl in group.impls if impl in SLOW_KERNELS]
    figures = []
    for metric in plots.METRICS:
        if chart := group.chart(metric):
            figures.append(f'<div data-metric="{metric.key}">{charts.draw(chart)}</div>')
        if slow and (chart := group.chart(metric, slow)):
            figures.append(
                f'<div data-metric="{metric.key}" data-slow="no" hidden>{charts.draw(chart)}</div>'
            )
    names = escape(json.dumps(group.impls), quote=True)
    about = f'data-suite="{escape(group.suite, quote=True)}" data-impls="{names}"'
    return f'<div class="panel" {about}>{"".join(figures)}</div>'


def _roofline(record: Record, of: Sequence[Race]) -> str:
    found = plots.roofline(record, of)
    if not found:
        return ""
    names = plots.order({series.name for chart in found for series in chart.series})
    panels = "".join(f'<div class="panel">{charts.draw(chart, 420, 320)}</div>' for chart in found)
    return (
        "<h2>What bounds it</h2><p>Under the slanted part of the roof, memory limits a kernel; under the "
        "flat part, arithmetic does. On a GPU, f32 has two flat roofs: plain multiply-adds, and products of "
        "numbers that are split into two of f16, which cost three f16 products each. TF32 has a chart of its "
        "own. Both parts of the roof are rates of plain programs, measured on this machine: PyTorch's matrix "
        "product, and a copy. They are no limits of the hardware. A mark can be above them: the kernel "
        "multiplies faster than that product, reads more than it writes, or reads from a cache.</p>"
        f'{charts.legend(names)}<div class="panels large">{panels}</div>'
    )


def _exactness(of: Sequence[Race]) -> str:
    chart = plots.exactness(of)
    if chart is None:
        return ""
    names = [series.name for series in chart.series]
    panel = f'<div class="panel">{charts.draw(chart, 420, 340)}</div>'
    return (
        "<h2>How exact it is</h2><p>Errors of attention against float64, on the heads that were checked, "
        "without the rows that allow TF32. "
        "Below the dotted line, a kernel has less than twice the error of PyTorch's own arithmetic on the "
        "same inputs.</p>"
        f'{charts.legend(names)}<div class="panels large">{panel}</div>'
    )


def _environment(record: Record) -> str:
    texts = {key: x if isinstance(x, str) else json.dumps(x) for key, x in record.environment.items()}
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in texts.items())
    measured = escape(rates(record)) if record.rates else "no rates of the machine were measured"
    return (
        f"<h2>How to reproduce it</h2><p>{_again(record)}</p>"
        f"<details><summary>Machine and build</summary><p>{measured}</p><dl>{items}</dl></details>"
    )


def _again(record: Record) -> str:
    """The command that measured the rows, or one that measures the same suites."""
    if made := record.environment.get("command"):
        return f"Measured by <code>{escape(made)}</code>."
    named = list(dict.fromkeys(line["suite"] for line in record.rows if line["suite"] in suites.names()))
    if not named:
        return "The records do not say which command measured them."
    again = f"tilewise bench --suite {','.join(named)}"
    return f"The records do not contain their command; <code>{escape(again)}</code> measures the same suites."


def _method(command: str) -> str:
    made = f" This page was made by <code>{escape(command)}</code>." if command else ""
    return (
        "<h2>How it was measured</h2><p>All implementations of a problem ran in one process, in rounds: each "
        "runs once per round. Times are medians; on a GPU they are measured with CUDA events over at least "
        "20 rounds, on inputs that are no longer in the cache. FLOPs are the useful ones: 4·B·H·Sq·Sk·D "
        "forward, half of that with causal, 2.5 times as much backward; with a window or a block mask only "
        "the pairs that it keeps count; a matrix product has 2·M·N·K forward and twice as much backward. "
        "GB/s count every input and result once. MB is the peak of what a call allocates, with its results. "
        "The error is the largest against a float64 reference. A row without figures says why."
        f"{made}</p>"
    )
