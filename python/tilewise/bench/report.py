"""The HTML report: one file, nothing fetched, light and dark, readable on a phone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from tilewise.bench import charts, plots, summary
from tilewise.bench.records import Line, Record
from tilewise.bench.summary import SLOW_KERNELS, Race, name_of, races
from tilewise.bench.table import ceilings, digits, machine, unit

_CSS = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;font-size:16px}
main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:1.7rem;line-height:1.2;margin:.2em 0}
h2{font-size:1.2rem;margin:2.2em 0 .3em}
p{max-width:75ch;margin:.5em 0}
.soft,figcaption{color:var(--soft);font-size:.9rem}
.conclusion{background:var(--paper);border:1px solid var(--grid);border-left:4px solid var(--s-fused);
 border-radius:8px;padding:14px 18px;margin:18px 0}
.conclusion p{margin:.35em 0;max-width:85ch}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}
.card{background:var(--paper);border:1px solid var(--grid);border-radius:8px;padding:10px 16px}
.card b{display:block;font-size:1.35rem;line-height:1.3}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(310px,1fr));gap:14px}
.panel{background:var(--paper);border:1px solid var(--grid);border-radius:8px;padding:10px}
.panel svg,.wide svg{display:block;width:100%;height:auto}
.wide{background:var(--paper);border:1px solid var(--grid);border-radius:8px;padding:10px;overflow-x:auto}
.wide svg{min-width:480px;max-width:820px}
.panels.large{grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr))}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.9rem;margin:10px 0}
.legend span{display:inline-flex;align-items:center;gap:6px}
.legend svg{width:22px;height:12px;flex:none}
.tools{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center;margin:10px 0;font-size:.95rem}
.tools button{font:inherit;padding:5px 11px;border:1px solid var(--grid);border-radius:16px;
 background:var(--paper);color:var(--ink);cursor:pointer}
.tools button[aria-pressed=true]{background:var(--s-fused);border-color:var(--s-fused);color:var(--page);
 font-weight:600}
.tools input[type=search]{font:inherit;padding:6px 10px;border:1px solid var(--grid);border-radius:8px;
 background:var(--paper);color:var(--ink);min-width:min(320px,100%)}
select{font:inherit;padding:5px 8px;border:1px solid var(--grid);border-radius:8px;background:var(--paper);
 color:var(--ink);max-width:100%}
.scroll{overflow-x:auto;background:var(--paper);border:1px solid var(--grid);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child,.left{text-align:left}
thead th{background:var(--paper);color:var(--soft);font-weight:600;position:sticky;top:0}
thead th button{all:unset;cursor:pointer}
thead th button:focus-visible{outline:2px solid var(--s-fused)}
thead th[aria-sort=ascending] button::after{content:" ▲"}
thead th[aria-sort=descending] button::after{content:" ▼"}
tbody tr.ours td{font-weight:500}
tbody tr:hover{background:var(--page)}
td .dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:7px}
td.why{color:var(--soft);text-align:left;white-space:normal;font-style:italic}
.more{padding:10px}
details{margin:8px 0}summary{cursor:pointer}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;font-size:.9rem;overflow-wrap:anywhere}
dt{color:var(--soft)}dd{margin:0}
[hidden]{display:none!important}
@media(max-width:560px){main{padding:16px 12px 40px}
 td:first-child{white-space:normal;min-width:90px}.panels{grid-template-columns:1fr}th,td{padding:5px 7px}}
@media print{.tools{display:none}}
"""

_SCRIPT = """
for (const section of document.querySelectorAll('[data-growth]')) {
  const state = {suite: null, metric: 'throughput', slow: true};
  const suites = section.querySelector('select');
  const slow = section.querySelector('input[type=checkbox]');
  const show = () => {
    state.suite = suites ? suites.value : null;
    state.slow = slow ? slow.checked : true;
    for (const panel of section.querySelectorAll('.panel')) {
      const figures = [...panel.querySelectorAll('[data-metric]')];
      const fits = figures.filter(f => f.dataset.metric === state.metric);
      const chosen = fits.find(f => (f.dataset.slow === 'no') === !state.slow) || fits[0];
      for (const figure of figures) figure.hidden = figure !== chosen;
      panel.hidden = !chosen || (state.suite !== null && panel.dataset.suite !== state.suite);
    }
    for (const button of section.querySelectorAll('button[data-metric-choice]'))
      button.setAttribute('aria-pressed', button.dataset.metricChoice === state.metric);
  };
  for (const button of section.querySelectorAll('button[data-metric-choice]'))
    button.addEventListener('click', () => { state.metric = button.dataset.metricChoice; show(); });
  if (suites) suites.addEventListener('change', show);
  if (slow) slow.addEventListener('change', show);
  show();
}
for (const holder of document.querySelectorAll('[data-rows]')) {
  const table = holder.querySelector('table'), body = table.tBodies[0];
  const search = holder.querySelector('input[type=search]'), count = holder.querySelector('.count');
  const more = holder.querySelector('.more'), all = [...body.rows];
  let limit = 100;
  const value = (row, column) => {
    const cell = row.cells[column];
    if (!cell) return null;
    return 'v' in cell.dataset ? parseFloat(cell.dataset.v) : cell.textContent;
  };
  const show = () => {
    const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
    const fits = [...body.rows].filter(row => words.every(w => row.textContent.toLowerCase().includes(w)));
    const kept = new Set(fits.slice(0, limit));
    for (const row of body.rows) row.hidden = !kept.has(row);
    count.textContent = `${fits.length} of ${all.length} rows`;
    more.hidden = fits.length <= limit;
  };
  for (const [column, header] of [...table.tHead.rows[0].cells].entries()) {
    header.querySelector('button').addEventListener('click', () => {
      const up = header.getAttribute('aria-sort') !== 'ascending';
      for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
      header.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const sorted = [...body.rows].map(row => [value(row, column), row]);
      const empty = x => x === null || Number.isNaN(x);
      sorted.sort(([a], [b]) => {
        if (empty(a) || empty(b)) return empty(a) - empty(b);  // always last
        const order = typeof a === 'number' ? a - b : a.localeCompare(b, 'en', {numeric: true});
        return up ? order : -order;
      });
      body.append(...sorted.map(([, row]) => row));
      show();
    });
  }
  more.querySelector('button').addEventListener('click', () => { limit = Infinity; show(); });
  search.addEventListener('input', show);
  show();
}
document.documentElement.dataset.ready = 'yes';
"""


def page(records: Sequence[Record]) -> str:
    """The report of some records, one part a machine."""
    machines = summary.by_machine(records)
    light = f"{charts.INK[False]}{charts.variables(False)}--page:#f5f7fa;"
    dark = f"{charts.INK[True]}{charts.variables(True)}--page:#0e1218;"
    names = " and ".join(record.machine for record in machines)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>Tilewise on {escape(names)}</title><link rel="icon" href="data:,"><style>'
        f":root{{{light}{charts.FONT}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{charts.CHART_CSS}{_CSS}</style></head><body><main>"
        + "".join(_machine(record) for record in machines)
        + _method()
        + f"</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _machine(record: Record) -> str:
    of = races(record.rows)
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in summary.conclusion(record))
    if busy := summary.busy(record):
        said += f'<p class="soft">{escape(busy)}</p>'
    parts = [
        f"<h1>Tilewise on {escape(record.machine)}</h1>",
        f'<p class="soft">{escape(machine(record.environment))}; '
        f"{escape(str(record.environment.get('date', 'no date'))[:10])}</p>",
        f'<section class="conclusion">{said}</section>',
        _cards(record, of),
        _ladder(of),
        _peers(of),
        _growth(of),
        _roofline(record, of),
        _exactness(of),
        _rows(record, of),
        _environment(record),
    ]
    return "".join(parts)


def _cards(record: Record, of: Sequence[Race]) -> str:
    stand = summary.standing(of)
    cards = []
    if stand:
        cards.append((f"{digits(stand.median)}×", "the fastest peer, median"))
        cards.append((f"{stand.faster} of {stand.count}", "problems ahead of it"))
    best = [race.best_ours for race in of if race.best_ours]
    percents = [line["percent_of_peak"] for line in best if line.get("percent_of_peak")]
    if percents:
        cards.append((f"{max(percents):.0f} %", "of the arithmetic ceiling, at best"))
    if record.copy_ceiling:
        cards.append((f"{digits(record.copy_ceiling)} GB/s", "copy, measured"))
    errors = [line["error"] for line in best if line.get("error") and line["dtype"] == "f32"]
    if errors:
        cards.append((f"{max(errors):.1e}", "largest f32 error"))
    inside = "".join(
        f'<div class="card"><b>{escape(figure)}</b><span class="soft">{escape(words)}</span></div>'
        for figure, words in cards
    )
    return f'<div class="cards">{inside}</div>'


def _ladder(of: Sequence[Race]) -> str:
    drawings = plots.ladders(of)
    if not drawings:
        return ""
    panels = "".join(f'<div class="panel">{svg}</div>' for svg in drawings)
    return (
        "<h2>The ladder</h2><p>Every kernel on the problem that most of them took, slowest first, "
        f'with the peers among them. Longer is better.</p><div class="panels large">{panels}</div>'
    )


def _peers(of: Sequence[Race]) -> str:
    drawing = plots.against_peers(of)
    if not drawing:
        return ""
    names = plots.order({race.best_ours["impl"] for race in of if race.best_ours and race.speed_up})
    return (
        "<h2>Against the peers</h2><p>A mark is a problem: the time of the fastest peer over that of our "
        "fastest kernel. Right of the line Tilewise is ahead; the bar is the median.</p>"
        f'{charts.legend(names)}<div class="wide">{drawing}</div>'
    )


def _growth(of: Sequence[Race]) -> str:
    groups = plots.growths(of)
    if not groups:
        return ""
    suites = list(dict.fromkeys(group.suite for group in groups))
    impls = plots.order({impl for group in groups for impl in group.impls})
    slow = any(impl in SLOW_KERNELS for impl in impls)
    panels = "".join(_growth_panel(group) for group in groups)
    present = [metric for metric in plots.METRICS if f'data-metric="{metric.key}"' in panels]
    buttons = "".join(
        f'<button type="button" data-metric-choice="{metric.key}" aria-pressed="false">'
        f"{metric.title}</button>"
        for metric in present
    )
    options = "".join(f"<option>{escape(suite)}</option>" for suite in suites)
    choice = f"<label>suite <select>{options}</select></label>" if len(suites) > 1 else ""
    box = '<label><input type="checkbox" checked> with the slowest rung</label>' if slow else ""
    return (
        "<section data-growth><h2>How it grows</h2><p>Each panel is a family of problems that differ in one "
        "size. Both axes are logarithmic; point at a mark for its figures.</p>"
        f'<div class="tools">{buttons}</div><div class="tools">{choice}{box}</div>{charts.legend(impls)}'
        f'<div class="panels">{panels}</div></section>'
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
    return f'<div class="panel" data-suite="{escape(group.suite, quote=True)}">{"".join(figures)}</div>'


def _roofline(record: Record, of: Sequence[Race]) -> str:
    found = plots.roofline(record, of)
    if not found:
        return ""
    names = plots.order({series.name for chart in found for series in chart.series})
    panels = "".join(f'<div class="panel">{charts.draw(chart, 480, 330)}</div>' for chart in found)
    return (
        "<h2>What bounds it</h2><p>Under the slanted part of the roof a kernel waits for bytes, under the "
        "flat part for arithmetic. The ceilings were measured in the same run; a mark above them had help "
        "from a cache, or was measured in a quieter moment.</p>"
        f'{charts.legend(names)}<div class="panels large">{panels}</div>'
    )


def _exactness(of: Sequence[Race]) -> str:
    chart = plots.exactness(of)
    if chart is None:
        return ""
    names = [series.name for series in chart.series]
    panel = f'<div class="panel">{charts.draw(chart, 480, 360)}</div>'
    return (
        "<h2>How exact it is</h2><p>Errors against float64, of attention on the heads that were checked. "
        "Below the dotted line a kernel has less than twice the error of PyTorch's own arithmetic on the "
        "same inputs.</p>"
        f'{charts.legend(names)}<div class="panels large">{panel}</div>'
    )


_COLUMNS: tuple[tuple[str, str | None], ...] = (
    ("problem", None),
    ("type", None),
    ("pass", None),
    ("who", None),
    ("ms", "ms"),
    ("TFLOP/s", "tflops"),
    ("% peak", "percent_of_peak"),
    ("GB/s", "gbps"),
    ("% copy", "percent_of_copy"),
    ("× fastest peer", "gain"),
    ("MB", "peak_mb"),
    ("error", "error"),
    ("spread", "spread"),
    ("suite", None),
)


def _rows(record: Record, of: Sequence[Race]) -> str:
    head = "".join(
        f'<th{"" if figure else " class=left"}><button type="button">{title}</button></th>'
        for title, figure in (
            (unit(of[0].first)[0] if key == "tflops" else name, key) for name, key in _COLUMNS
        )
    )
    body = "".join(_row(race, line) for race in of for line in race.lines)
    return (
        "<section data-rows><h2>Every row</h2>"
        '<div class="tools"><input type="search" placeholder="filter: causal bf16 backward"'
        ' aria-label="filter rows"><span class="soft count"></span></div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        '<div class="more" hidden><button type="button">show all</button></div></div></section>'
    )


def _row(race: Race, line: Line) -> str:
    ours = summary.ours(line)
    dot = f'<span class="dot" style="background:{charts.colour(line["impl"])}"></span>'
    threads = f" · {line.get('threads')} thr." if line.get("level") is not None else ""
    who = f"{dot}{escape(line['impl'] + threads)}"
    words = (escape(str(line[key])) for key in ("dtype", "pass"))
    cells = [f"<td>{escape(name_of(line))}</td>", *(f"<td class=left>{x}</td>" for x in (*words, who))]
    suite = f"<td class=left>{escape(line['suite'])}</td>"
    if not line.get("ms"):
        reason = escape(str(line.get("skipped", "not measured")))
        return f'<tr>{"".join(cells)}<td class="why" data-v="" colspan="9">{reason}</td>{suite}</tr>'
    peer = race.best_peer
    tflops = line["tflops"] * unit(line)[1]
    figures: dict[str, Any] = {
        **line,
        "tflops": tflops,
        "gain": peer["ms"] / line["ms"] if peer and ours else None,
    }
    for _, figure in _COLUMNS:
        if figure is None:
            continue
        value = figures.get(figure)
        text = "–" if value is None else f"{value:.1e}" if figure == "error" else digits(value)
        if figure == "spread" and value is not None:
            text = f"{100 * value:.0f} %"
        exact = "" if value is None else f"{value:.6g}"
        cells.append(f'<td data-v="{exact}">{text}</td>')
    return f"<tr{' class=ours' if ours else ''}>{''.join(cells)}{suite}</tr>"


def _environment(record: Record) -> str:
    texts = {key: x if isinstance(x, str) else json.dumps(x) for key, x in record.environment.items()}
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in texts.items())
    rates = escape(ceilings(record)) if record.rates else "no ceilings measured"
    return f"<details><summary>Machine and build</summary><p>{rates}</p><dl>{items}</dl></details>"


def _method() -> str:
    return (
        "<h2>How it was measured</h2><p>All implementations of a problem ran in one process, in rounds, each "
        "once in turn. Times are medians; on a GPU of CUDA events over at least 20 rounds, on inputs that "
        "the others drove out of the cache. FLOPs are the useful ones: 4·B·H·Sq·Sk·D forward, half of it "
        "causal, 2.5 times as much backward; a window or block mask counts the pairs it keeps; a product of "
        "matrices is 2·M·N·K forward, twice as much backward. GB/s count every input and result once. MB are "
        "what a call allocates at its highest, results included. The error is the largest against a float64 "
        "reference. A row without figures says why.</p>"
    )
