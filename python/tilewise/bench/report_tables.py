"""The tables of the report: beside an earlier run, counters, every row, and the rows as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tilewise.bench import charts, compare, profile, summary
from tilewise.bench.compare import Comparison
from tilewise.bench.environment import slug
from tilewise.bench.records import Line, Record
from tilewise.bench.summary import Race, name_of
from tilewise.bench.table import digits, rate, unit
from tilewise.bench.words import line_words, problem_words, type_of, type_words


def said(kind: str, sentences: Sequence[str]) -> str:
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return f'<section class="{kind}">{said}</section>' if said else ""


def comparison_section(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    sentences = said("conclusion", compare.sentences(comparison))
    titles = ("suite", "type", "pass", "rows", "median", "clearly faster", "clearly slower", "peers' median")
    body = "".join(
        "<tr>"
        + "".join(f'<td class="left">{escape(x)}</td>' for x in (suite, type_words(dtype), direction))
        + "".join(
            f"<td>{x}</td>"
            for x in (
                len(group.changes),
                f"{group.median:.2f}×",
                group.faster,
                group.slower,
                f"{group.of_peers:.2f}×" if group.of_peers else "–",
            )
        )
        + "</tr>"
        for group in comparison.groups
        for suite, direction, dtype in (group.name,)
    )
    table = (
        f'<div class="scroll earlier"><table>{_head(titles, titles[:3])}<tbody>{body}</tbody></table></div>'
    )
    lists = "".join(
        f"<h3>{title}</h3><ul>"
        + "".join(
            f"<li>{escape(x.now['impl'])}, {escape(line_words(x.now))}: {digits(x.before['ms'])} ms before, "
            f"{digits(x.now['ms'])} ms now ({x.times:.2f}×)</li>"
            for x in found
        )
        + "</ul>"
        for title, found in (
            ("Slowed down most", comparison.most(faster=False)),
            ("Sped up most", comparison.most(faster=True)),
        )
        if found
    )
    return (
        "<h2>Compared with the earlier run</h2>"
        f"{sentences}<p>How many times as fast as before. A row changed clearly if it changed by more than "
        f"{100 * compare.LEAST_CHANGE:.0f} % and by more than either row's spread.</p>{table}{lists}"
    )


def _head(titles: Sequence[str], words: Sequence[str]) -> str:
    """Of a table that is not sorted; the columns of words are aligned at the left."""
    cells = "".join(f"<th{' class=left' if title in words else ''}>{escape(title)}</th>" for title in titles)
    return f'<thead class="unsorted"><tr>{cells}</tr></thead>'


# Counters


def counters(record: Record) -> str:
    """What ncu or torch's profiler counted of each kernel, where somebody looked."""
    if not record.profiles:
        return ""
    shown = ("time", "tensor pipe", "FMA pipe", "L1 and shared memory", "L2", "device memory", "occupancy")
    titles = (
        "problem",
        "who",
        "kernel",
        "µs",
        *(f"{name}, %" for name in shown[1:]),
        "registers",
        "bound by",
    )
    return (
        "<h2>What the counters say</h2><p>By <code>tilewise profile --out</code>: the share of the time in "
        "which each part of the GPU was busy, the occupancy (warps on an SM, of those that would fit), and "
        "what limits the kernel. Times under a profiler are longer than without it.</p>"
        f'<div class="scroll counters"><table>{_head(titles, (*titles[:3], titles[-1]))}<tbody>'
        + "".join(_counter_row(line, shown) for line in record.profiles)
        + "</tbody></table></div>"
    )


def _counter_row(line: Line, shown: Sequence[str]) -> str:
    figures: dict[str, float] = line["figures"]
    whole = {"hkv": line.get("hq"), "sk": line.get("sq"), "dv": line.get("d"), "causal": False, **line}
    problem = problem_words({**whole, "op": line.get("of", "attention")})
    problem += f"; {line['dtype']} {line['direction']}"
    cells = [f"<td>{escape(problem)}</td>", f'<td class="left">{escape(line["impl"])}</td>']
    cells.append(f'<td class="text left"><code>{escape(profile.kernel_name(line["kernel"]))}</code></td>')
    cells += [f"<td>{digits(figures.get(name))}</td>" for name in (*shown, "registers a thread")]
    return f'<tr>{"".join(cells)}<td class="text left">{escape(profile.bottleneck(figures))}</td></tr>'


# Rows


@dataclass(frozen=True)
class _Column:
    title: str
    figure: str | None = None  # of a line; None is words


_COLUMNS = (
    *(_Column("problem"), _Column("type"), _Column("pass"), _Column("who"), _Column("ms", "ms")),
    *(_Column("TFLOP/s", "tflops"), _Column("% of GEMM", "percent_of_peak"), _Column("GB/s", "gbps")),
    *(_Column("% of copy", "percent_of_copy"), _Column("× fastest peer", "gain"), _Column("MB", "peak_mb")),
    *(_Column("error", "error"), _Column("spread", "spread"), _Column("suite")),
)
_BEFORE = _Column("× before", "times")


def column_names() -> str:
    """Each figure's name, which stands before it on a phone."""
    names = [column.title for column in (*_COLUMNS, _BEFORE)]
    rules = "".join(f'[data-rows] td:nth-child({n}){{--name:"{name}"}}' for n, name in enumerate(names, 1))
    earlier = ("suite", "type", "pass", "rows", "median", "faster", "slower", "peers")
    rules += "".join(f'.earlier td:nth-child({n}){{--name:"{name}"}}' for n, name in enumerate(earlier, 1))
    counters = [*("", "who", "kernel", "µs", "tensor, %", "FMA, %", "L1, %", "L2, %", "memory, %")]
    counters += ["occupancy, %", "registers", "bound by"]
    rules += "".join(f'.counters td:nth-child({n}){{--name:"{name}"}}' for n, name in enumerate(counters, 1))
    return rules + '[data-rows=cpu] td:nth-child(6){--name:"GFLOP/s"}'


def rows_section(of: Sequence[Race], comparison: Comparison | None) -> str:
    rates, _ = unit(of[0].first)
    columns = [*_COLUMNS, *([_BEFORE] if comparison else [])]
    head = "".join(
        f'<th{"" if column.figure else " class=left"}><button type="button">'
        f"{rates if column.figure == 'tflops' else column.title}</button></th>"
        for column in columns
    )
    body = "".join(
        _row(race, line, comparison)
        for race in of
        for line in sorted(race.lines, key=lambda line: not line.get("ms"))
    )
    kind = "cpu" if rates == "GFLOP/s" else "gpu"
    return (
        f'<section data-rows="{kind}"><h2>Every row</h2>'
        "<p>% of GEMM compares a row with the rate of PyTorch's large matrix product in the same type, "
        "measured on the same machine. In f32 on a GPU, and in records of the C++ benchmark, that is the "
        "rate of bare multiply-adds; for kernels that split numbers for the tensor cores it is a third of "
        "the product's rate in f16. % of copy compares GB/s with a large copy's. Neither is a limit: a "
        "kernel that multiplies faster than that product, or reads more than it writes, is above 100. TF32 "
        "is f32 whose products may be as inexact as TF32.</p>"
        '<div class="tools"><input type="search" placeholder="filter: causal bf16 backward"'
        ' aria-label="filter rows"><span class="soft count"></span></div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        '<div class="more tools" hidden><button type="button">show all</button></div></div></section>'
    )


def _row(race: Race, line: Line, comparison: Comparison | None) -> str:
    ours = summary.ours(line)
    dot = f'<span class="dot" style="background:{charts.colour(line["impl"])}"></span>'
    threads = f" · {line.get('threads')} thr." if line.get("level") is not None else ""
    who = f"{dot}{escape(line['impl'] + threads)}"
    words = (escape(type_words(str(type_of(line)))), escape(str(line["pass"])))
    cells = [f"<td>{escape(problem_words(line))}</td>", *(f"<td class=left>{x}</td>" for x in (*words, who))]
    last = [f"<td class=left>{escape(line['suite'])}</td>"]
    last += [_cell("times", comparison.times_of(line), line)] if comparison else []
    short = f'data-short="{escape(name_of(line), quote=True)}"'
    if not line.get("ms"):
        reason = escape(str(line.get("skipped", "not measured")))
        why = f'<td class="why" data-v="" colspan="9">{reason}</td>'
        return f'<tr class="skipped" {short}>{"".join([*cells, why, *last])}</tr>'
    peer = race.best_peer
    figures: dict[str, Any] = {
        **line,
        "tflops": line["tflops"] * unit(line)[1],
        "gain": peer["ms"] / line["ms"] if peer and ours else None,
    }
    cells += [_cell(column.figure, figures.get(column.figure), line) for column in _COLUMNS if column.figure]
    return f"<tr{' class=ours' if ours else ''} {short}>{''.join([*cells, *last])}</tr>"


def _cell(figure: str, value: float | None, line: Line) -> str:
    text = "–" if value is None else f"{value:.1e}" if figure == "error" else digits(value)
    if value is not None and figure in ("gain", "times"):
        text = f"{value:.2f}"
    if value is not None and figure == "spread":
        text = f"{100 * value:.0f} %"
    exact = "" if value is None else f"{value:.6g}"
    what = line.get("yardstick") if figure == "percent_of_peak" else None
    tip = f' title="of {escape(what, quote=True)}, {rate(line["peak_tflops"])}"' if what else ""
    return f'<td data-v="{exact}"{tip}>{text}</td>'


# Data


def download(record: Record, comparison: Comparison | None) -> str:
    """Every row as CSV or JSON lines, made in the browser of what the page holds."""
    rows = [
        {**line, **({"times_before": comparison.times_of(line)} if comparison else {})}
        for line in record.rows
    ]
    columns = list(dict.fromkeys(key for line in rows for key in line))
    cells = [[_plain(line.get(key)) for key in columns] for line in rows]
    data = json.dumps({"name": f"tilewise-{slug(record.environment)}", "columns": columns, "rows": cells})
    text = data.replace("<", "\\u003c")  # or a record could end the script
    return (
        '<section data-download><h2>Data</h2><p>Every row of this page:</p><div class="tools">'
        '<button type="button" data-kind="csv">CSV</button>'
        '<button type="button" data-kind="jsonl">JSON lines</button></div>'
        f'<script type="application/json">{text}</script></section>'
    )


def _plain(value: Any) -> Any:
    """A cell of a table: sizes and windows as one text, figures with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return json.dumps(value) if isinstance(value, (dict, list)) else value
