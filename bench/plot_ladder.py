"""Draws docs/ladder.md's table and plot from a record of gpu-bench.

    python bench/plot_ladder.py results/<gpu>/ladder.jsonl

The table replaces what is between the two marker comments of the page. The plot needs matplotlib, which the
project does not ask for otherwise; --no-plot leaves it out. The same record gives the same files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN = "<!-- ladder: begin, by bench/plot_ladder.py -->"
END = "<!-- ladder: end -->"

RUNGS = ("naive", "tiled", "fused")
PEER = "torch efficient"
IMPLS = (*RUNGS, PEER)
# naive and tiled take the same memory: the one's marker goes round the other's.
STYLES: dict[str, dict[str, Any]] = {
    "naive": {"color": "#c0561f", "marker": "o", "markersize": 8, "markerfacecolor": "none"},
    "tiled": {"color": "#2a8fb0", "marker": "s", "markersize": 4},
    "fused": {"color": "#1b2f6b", "marker": "D", "markersize": 4},
    PEER: {"color": "#777777", "marker": "x", "markersize": 5, "linestyle": "--"},
}
FMA_RATE = "multiply-adds"
MATMUL_RATE = "torch matmul, no TF32"
NOTHING = "-"  # in a cell that the record has no figure for


@dataclass(frozen=True)
class Measured:
    ms: float
    tflops: float
    scratch_mb: float  # what a call allocates beyond o, or beyond dq, dk and dv


@dataclass(frozen=True)
class Series:
    """The problems of one table: all lengths, full and causal."""

    direction: str
    d: int


class Record:
    def __init__(self, path: Path) -> None:
        self.environment: dict[str, Any] = {}
        self.rates: dict[str, float] = {}
        self.cells: dict[tuple[Series, bool, int, str], Measured] = {}
        self.batch, self.heads = 0, 0
        for text in path.read_text().splitlines():
            self._add(json.loads(text))
        if not self.cells:
            raise ValueError(f"{path} has no times of {', '.join(IMPLS)}")

    def _add(self, line: dict[str, Any]) -> None:
        if "environment" in line:
            self.environment = line["environment"]
        elif line["op"] == "rate":
            self.rates[line["impl"]] = line["tflops"]
        elif line["impl"] in IMPLS and line["dtype"] == "f32" and line["ms"] is not None:
            self.batch, self.heads = line["b"], line["hq"]
            o_mb = 4e-6 * line["b"] * line["hq"] * line["sq"] * line["dv"]
            results_mb = o_mb * (1 if line["pass"] == "forward" else 3)
            scratch_mb = line["peak_mb"] - results_mb
            if scratch_mb < 1e-5 * results_mb:  # the record has six digits
                scratch_mb = 0.0
            key = Series(line["pass"], line["d"]), line["causal"], line["sq"], line["impl"]
            self.cells[key] = Measured(line["ms"], line["tflops"], scratch_mb)

    @property
    def series(self) -> list[Series]:
        every = {series for series, *_ in self.cells}
        return sorted(every, key=lambda series: (series.direction != "forward", series.d))

    def lengths(self, series: Series, causal: bool) -> list[int]:
        return sorted({s for of, mask, s, _ in self.cells if (of, mask) == (series, causal)})

    def get(self, series: Series, causal: bool, s: int, impl: str) -> Measured | None:
        return self.cells.get((series, causal, s, impl))


# The table


def figure(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def cell(measured: Measured | None) -> str:
    if measured is None:
        return NOTHING
    scratch = f"{measured.scratch_mb:.1f}" if measured.scratch_mb < 100 else f"{measured.scratch_mb:.0f}"
    return f"{figure(measured.ms)} · {figure(measured.tflops)} · {scratch}"


def times_as_fast(slow: Measured | None, fast: Measured | None) -> str:
    return f"{slow.ms / fast.ms:.2f}" if slow and fast else NOTHING


def table(record: Record, series: Series) -> Iterator[str]:
    gains = ("tiled : naive", "fused : tiled", f"fused : {PEER}")
    yield f"| {series.direction} D {series.d} | S | " + " | ".join((*IMPLS, *gains)) + " |"
    yield "| --- | ---: |" + " ---: |" * (len(IMPLS) + len(gains))
    for causal in (False, True):
        for s in record.lengths(series, causal):
            of = {impl: record.get(series, causal, s, impl) for impl in IMPLS}
            steps = (("naive", "tiled"), ("tiled", "fused"), (PEER, "fused"))
            columns = [cell(of[impl]) for impl in IMPLS]
            columns += [times_as_fast(of[slow], of[fast]) for slow, fast in steps]
            yield f"| {'causal' if causal else 'full'} | {s} | " + " | ".join(columns) + " |"


def section(record: Record) -> str:
    environment = record.environment
    rates = [
        f"{figure(record.rates[name])} TFLOP/s by {what}"
        for name, what in ((FMA_RATE, "bare multiply-adds"), (MATMUL_RATE, "PyTorch's f32 matrix product"))
        if record.rates.get(name)
    ]
    sizes = f"f32, B {record.batch}, H {record.heads}"
    lines = [
        f"{environment['gpu']}, driver {environment['driver']}, PyTorch {environment['torch']}; {sizes}.",
        *([f"In the same run the card gave {' and '.join(rates)}."] if rates else []),
    ]
    for series in record.series:
        lines += ["", *table(record, series)]
    return "\n".join(lines)


def replace_section(page: Path, text: str) -> None:
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the comments {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


# The plot


def draw(record: Record, path: Path) -> None:
    """A row a pass: the rate at each head dim, then the scratch memory, without a mask."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    matplotlib.rcParams |= {
        "svg.hashsalt": "tilewise",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.titlesize": 9,
    }

    passes = sorted({series.direction for series in record.series}, reverse=True)
    dims = sorted({series.d for series in record.series})
    figure_, axes = pyplot.subplots(
        len(passes), len(dims) + 1, figsize=(3.6 * (len(dims) + 1), 2.9 * len(passes) + 0.4), squeeze=False
    )
    for row, direction in zip(axes, passes, strict=True):
        for axis, d in zip(row, dims, strict=False):
            draw_lines(axis, record, Series(direction, d), "tflops")
            if rate := record.rates.get(FMA_RATE):
                axis.axhline(rate, color="black", linewidth=0.8, linestyle=":", label="bare multiply-adds")
            axis.set(title=f"{direction}, D {d}: TFLOP/s", ylim=(0.3, 100))
        draw_lines(row[-1], record, Series(direction, dims[0]), "scratch_mb")
        row[-1].set_title(f"{direction}, D {dims[0]}: MB beyond the results")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure_.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure_.tight_layout(rect=(0, 0, 1, 0.94))
    figure_.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def draw_lines(axis: Any, record: Record, series: Series, what: str) -> None:
    lengths = record.lengths(series, False)
    for impl in IMPLS:
        found = [(s, record.get(series, False, s, impl)) for s in lengths]
        points = [(s, getattr(measured, what)) for s, measured in found if measured]
        points = [(s, value) for s, value in points if value > 0]  # a logarithmic axis has no 0
        lengths_of, values = zip(*points, strict=True) if points else ((), ())
        axis.plot(lengths_of, values, label=impl, linewidth=1.4, **STYLES[impl])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(s) for s in lengths])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(True, linewidth=0.3)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="results/<gpu>/ladder.jsonl")
    parser.add_argument("--page", type=Path, default=DOCS / "ladder.md")
    parser.add_argument("--plot", type=Path, default=DOCS / "ladder.svg")
    parser.add_argument("--no-plot", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    record = Record(options.record)
    replace_section(options.page, section(record))
    if options.no_plot:
        return 0
    try:
        draw(record, options.plot)
    except ModuleNotFoundError as error:
        print(f"the table is written, but the plot needs matplotlib in {sys.executable}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
