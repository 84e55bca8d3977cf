"""Plots as PNG, by matplotlib, for where SVG is not taken."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tilewise.bench import charts, plots
from tilewise.bench.charts import Chart
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Record
from tilewise.bench.summary import races

_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle": "^",
    "down": "v",
    "cross": "x",
    "plus": "+",
}


def check() -> Any:
    """matplotlib's pyplot. Raises BadInput, with the way to get it, where there is none."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise BadInput(
            f"--png: expected matplotlib, got {error}; `pip install matplotlib` installs it, SVG needs none"
        ) from None


def write_all(record: Record, folder: Path) -> None:
    """The line and scatter charts of a machine."""
    pyplot = check()
    of = races(record.rows)
    for group in plots.growths(of):
        stem = charts.slug(f"{group.suite} {group.title}").replace("--", "-").replace("--", "-")
        for metric in plots.METRICS:
            if chart := group.chart(metric):
                _write(pyplot, chart, folder / f"{metric.key}-{stem}.png")
    for chart in plots.roofline(record, of):
        _write(pyplot, chart, folder / f"roofline-{chart.title.split(':')[0]}.png")
    if chart := plots.exactness(of):
        _write(pyplot, chart, folder / "error.png")


def _write(pyplot: Any, chart: Chart, path: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(5.2, 3.6), dpi=140)
    for series in chart.series:
        light, _, shape = charts.style(series.name)
        line = "" if not series.joined else "--" if series.dashed else "-"
        xs, ys = zip(*series.points, strict=True)
        axis.plot(xs, ys, line, color=light, marker=_MARKERS[shape], markersize=4, label=series.name)
    for _, rule in chart.rules:
        axis.plot(*zip(*rule, strict=True), ":", color="#5b6474", linewidth=1)
    for scale, of, of_axis in (
        (axis.set_xscale, chart.x, axis.xaxis),
        (axis.set_yscale, chart.y, axis.yaxis),
    ):
        if of.log:
            scale("log")
        of_axis.set_ticks(of.ticks, [charts.tick_text(tick) for tick in of.ticks])
        of_axis.set_ticks([], minor=True)
    axis.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label)
    axis.title.set_fontsize(9)
    axis.grid(True, linewidth=0.3)
    axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
