"""Charts as SVG text, with colours from CSS variables so that a page decides on light or dark.

Nothing is needed to draw them. Every mark has its figures in a <title>, which browsers show as a tip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Colours that those who see few can tell apart (after Okabe and Ito), for light and for dark paper, and a
# marker, so that no series is told by its colour alone.
STYLES: dict[str, tuple[str, str, str]] = {
    "naive": ("#d55e00", "#ff8a3d", "circle"),
    "reference": ("#d55e00", "#ff8a3d", "circle"),
    "tiled": ("#b98500", "#f0b93a", "square"),
    "triton": ("#6b5b95", "#b8a9e0", "cross"),
    "fused": ("#0b63b0", "#5db4ff", "diamond"),
    "simd": ("#0b63b0", "#5db4ff", "diamond"),
    "mma": ("#00805c", "#35d0a0", "triangle"),
    "wgmma": ("#8a3ea8", "#d58df0", "down"),
    "wide": ("#a8324a", "#ff8fa3", "square"),
    "simt": ("#b98500", "#f0b93a", "square"),
    "wide_batched": ("#1f7a4d", "#6fd3a0", "diamond"),
    "wgmma_halves": ("#a8328c", "#f09ad8", "diamond"),
    "split": ("#00805c", "#35d0a0", "square"),
    "cublaslt": ("#6b5b95", "#b8a9e0", "circle"),
    "chunked": ("#0b63b0", "#5db4ff", "diamond"),
    "few_rows": ("#00808c", "#3fd0dd", "triangle"),
    "tilewise": ("#8a3ea8", "#d58df0", "down"),
    "tilewise graph": ("#5b2b8c", "#b79bff", "diamond"),
    "torch eager": ("#555b66", "#b9bfca", "plus"),
    "torch graph": ("#6f4a2f", "#d0a27f", "cross"),
    "torch compiled": ("#4d6b2f", "#a9cc83", "plus"),
    "torch compiled graph": ("#8c4a63", "#e3a1b8", "plus"),
    "hugging face": ("#7a2f2f", "#e08a8a", "cross"),
    "auto": ("#1c2330", "#e8ebf1", "circle"),
    "layer": ("#a8324a", "#ff8fa3", "square"),
    "sdpa": ("#6f4a2f", "#d0a27f", "cross"),
    "torch": ("#6f4a2f", "#d0a27f", "cross"),
    "torch + auto": ("#4d6b2f", "#a9cc83", "plus"),
    "torch math": ("#8a8a8a", "#8f949c", "cross"),
    "torch efficient": ("#555b66", "#b9bfca", "plus"),
    "torch flash": ("#6f4a2f", "#d0a27f", "cross"),
    "torch cudnn": ("#4d6b2f", "#a9cc83", "plus"),
    "torch flex": ("#8c4a63", "#e3a1b8", "cross"),
    "flash-attn": ("#7a2f2f", "#e08a8a", "plus"),
    "flash-attn 3": ("#a02f5a", "#f08ab5", "square"),
    "flash-attn 4": ("#c2410c", "#ffb38a", "circle"),
    "xformers": ("#2f6f7a", "#8ad0dd", "cross"),
    "flashinfer": ("#5a5a1f", "#cfcf6a", "plus"),
}
_OTHER = ("#444444", "#c0c0c0", "circle")


def style(name: str) -> tuple[str, str, str]:
    """Light and dark colour and marker; a name in capitals has the same."""
    return STYLES.get(name.lower(), _OTHER)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def variables(dark: bool, of: str = "") -> str:
    """The declarations of every series' colour, or of those that a drawing has."""
    styles = {f"--s-{slug(name)}": style[dark] for name, style in {**STYLES, "other": _OTHER}.items()}
    return "".join(f"{name}:{style};" for name, style in styles.items() if not of or f"var({name})" in of)


INK = {False: "--ink:#1c2330;--soft:#5b6474;--grid:#e3e7ee;--paper:#ffffff;",
       True: "--ink:#e8ebf1;--soft:#a0a8b6;--grid:#2c3442;--paper:#151a22;"}  # fmt: skip
FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
CHART_CSS = (
    ".chart text{fill:var(--soft);font-size:11px}"
    ".chart .title{fill:var(--ink);font-size:12.5px;font-weight:600}"
    ".chart .grid{stroke:var(--grid);stroke-width:1}"
    ".chart .axis{stroke:var(--soft);stroke-width:1}"
    ".chart .rule{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}"
    ".chart .value{fill:var(--ink)}"
    ".chart .name{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:4px}"
    ".chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round}"
)


def standalone(svg: str) -> str:
    """A file of its own of an <svg class="chart">: the reader's preference picks its colours."""
    css = (
        f"svg{{{INK[False]}{variables(False, svg)}{FONT};background:var(--paper)}}{CHART_CSS}"
        f"@media(prefers-color-scheme:dark){{svg{{{INK[True]}{variables(True, svg)}}}}}"
    )
    opening, _, rest = svg.partition(">")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{opening}><style>{css}</style>{rest}\n'


def colour(name: str) -> str:
    return f"var(--s-{slug(name) if name.lower() in STYLES else 'other'})"


# Axes


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def place(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def axis(label: str, values: Sequence[float], log: bool, ticks: Sequence[float] = ()) -> Axis:
    """An axis round the values; logarithmic ones hold positive values alone.

    >>> axis("ms", [0.3, 40.0], log=True).ticks
    (0.3, 1.0, 3.0, 10.0, 30.0)
    >>> axis("x", [0.0, 7.0], log=False).ticks
    (0.0, 2.0, 4.0, 6.0)
    """
    usable = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not usable:
        usable = [1.0]
    low, high = min(usable), max(usable)
    if not log:
        high = high * 1.05 if high > 0 else 1.0
        return Axis(label, 0.0, high, False, tuple(ticks) or _linear_ticks(high))
    if ticks:
        margin = (max(high, *ticks) / min(low, *ticks)) ** 0.04 if len(ticks) > 1 else 1.4
        return Axis(label, min(low, *ticks) / margin, max(high, *ticks) * margin, True, tuple(ticks))
    low, high = low / 1.25, high * 1.25
    if high / low < 4:  # a narrow range would have no tick
        middle = math.sqrt(low * high)
        low, high = min(low, middle / 2), max(high, middle * 2)
    return Axis(label, low, high, True, _log_ticks(low, high))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    decades = math.log10(high / low)
    steps = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 3.2 else (1.0,)
    found = [
        float(f"{step}e{exponent}")
        for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for step in steps
    ]
    ticks = [tick for tick in found if low <= tick <= high]
    return tuple(ticks[:: -(-len(ticks) // 7)] if len(ticks) > 8 else ticks)


def _linear_ticks(high: float) -> tuple[float, ...]:
    rough = high / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return tuple(step * n for n in range(int(high / step) + 1))


def tick_text(value: float) -> str:
    """Short: 0.01, 30, 4k.

    >>> [tick_text(x) for x in (1e-7, 0.01, 0.5, 30.0, 4096.0, 16384.0, 131072.0, 1500.0)]
    ['1e-7', '0.01', '0.5', '30', '4k', '16k', '128k', '1500']
    """
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    if value != 0 and (value < 1e-3 or value >= 1e5):
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:g}"


# Line and scatter charts


@dataclass(frozen=True)
class Series:
    name: str  # of an implementation: colour and marker follow from it
    points: tuple[tuple[float, float], ...]
    tips: tuple[str, ...] = ()
    joined: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = field(default=())  # label, line


def marker(name: str, x: float, y: float, tip: str = "", size: float = 4.0) -> str:
    shape = style(name)[2]
    paint = f'fill="{colour(name)}"'
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    if shape in ("cross", "plus"):
        r = size * 0.9
        d = f"M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}m0 {-2 * r:.1f}l{-2 * r:.1f} {2 * r:.1f}"
        if shape == "plus":
            r = size * 1.1
            d = f"M{x - r:.1f} {y:.1f}h{2 * r:.1f}M{x:.1f} {y - r:.1f}v{2 * r:.1f}"
        # The wide, unseen stroke is there to be pointed at.
        return (
            f'<g fill="none"><path d="{d}" stroke="{colour(name)}" stroke-width="1.8"/>'
            f'<path d="{d}" stroke="transparent" stroke-width="9">{inside}</path></g>'
        )
    if shape == "circle":
        # A ring, so that what lies on the same spot is seen inside it.
        ring = f'fill="none" stroke="{colour(name)}" stroke-width="1.8" pointer-events="all"'
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size + 1:.1f}" {ring}>{inside}</circle>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
        "down": ((0, 1.2), (1.2, -1), (-1.2, -1)),
    }[shape]
    points = " ".join(f"{x + size * dx * 0.95:.1f},{y + size * dy * 0.95:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {paint}>{inside}</polygon>'


def draw(chart: Chart, width: int = 360, height: int = 250) -> str:
    """The chart as an <svg>; it takes the width it is given and keeps its proportions."""
    return _svg(width, height, _body(chart, width, height), chart.title)


def _svg(width: float, height: float, body: str, label: str) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{escape(label, quote=True)}">{body}</svg>'
    )


def _body(chart: Chart, width: float, height: float) -> str:
    left, right, top, bottom = 46.0, 14.0, 44.0, 40.0
    plot_w, plot_h = width - left - right, height - top - bottom

    def at(x: float, y: float) -> tuple[float, float]:
        return left + plot_w * chart.x.place(x), top + plot_h * (1 - chart.y.place(y))

    parts = [f'<text class="title" x="6" y="16">{escape(chart.title)}</text>']
    parts.append(f'<text x="6" y="33">{escape(chart.y.label)}</text>')
    for tick in chart.y.ticks:
        y = top + plot_h * (1 - chart.y.place(tick))
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}h{plot_w:.1f}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    room = max(1, -(-len(chart.x.ticks) * 38 // int(plot_w)))
    for n, tick in enumerate(chart.x.ticks):
        x = left + plot_w * chart.x.place(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {top + plot_h:.1f}v4"/>')
        if n % room == 0:
            y = top + plot_h + 16
            parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{tick_text(tick)}</text>')
    parts.append(f'<path class="axis" d="M{left:.1f} {top + plot_h:.1f}h{plot_w:.1f}"/>')
    x, y = left + plot_w, height - 8
    parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="end">{escape(chart.x.label)}</text>')
    for _, line in chart.rules:
        path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in line)
        parts.append(f'<path class="rule" fill="none" d="M{path}"/>')
    for series in chart.series:
        parts.append(_series(series, at))
    for label, line in chart.rules:  # above the marks, or they would hide it
        x, y = at(*line[-1])
        place = f'x="{x - 2:.1f}" y="{y - 5:.1f}"'
        parts += [f'<text class="name" {place} text-anchor="end">{escape(label)}</text>'] if label else []
    return "".join(parts)


def _series(series: Series, at: object) -> str:
    place = at  # (x, y) of the data → (x, y) of the drawing
    points = [place(*point) for point in series.points]  # type: ignore[operator]
    parts = []
    if series.joined and len(points) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="line" stroke="{colour(series.name)}"{_dash(series)} d="M{path}"/>')
    tips = series.tips or ("",) * len(points)
    parts += [marker(series.name, x, y, tip) for (x, y), tip in zip(points, tips, strict=True)]
    return "".join(parts)


def _dash(series: Series) -> str:
    return ' stroke-dasharray="5 3"' if series.dashed else ""


def legend(names: Sequence[str]) -> str:
    """As HTML: each name with its marker."""
    items = "".join(
        f'<span data-name="{escape(name, quote=True)}">'
        f'<svg class="chart" viewBox="0 0 22 12" width="22" height="12" aria-hidden="true">'
        f'<path class="line" stroke="{colour(name)}" d="M1 6h20"/>{marker(name, 11, 6)}</svg>'
        f"{escape(name)}</span>"
        for name in names
    )
    return f'<div class="legend">{items}</div>'


# Bars and strips


@dataclass(frozen=True)
class Bar:
    label: str
    name: str  # whose colour
    value: float
    text: str


def bars(title: str, rows: Sequence[Bar], about: str = "", width: int = 420) -> str:
    """Horizontal bars from 0, a value behind each."""
    step, top, left = 24, 46 if about else 30, 112
    high = max(row.value for row in rows) or 1.0
    room = width - left - 96
    parts = [f'<text class="title" x="6" y="16">{escape(title)}</text>']
    parts += [f'<text x="6" y="33">{escape(about)}</text>'] if about else []
    for n, row in enumerate(rows):
        y, length = top + n * step, max(1.0, room * row.value / high)
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="17" rx="2" fill="{colour(row.name)}">'
            f"<title>{escape(f'{row.label}: {row.text}')}</title></rect>"
        )
        parts.append(
            f'<text class="value" x="{left + length + 6:.1f}" y="{y + 13}">{escape(row.text)}</text>'
        )
    return _svg(width, top + step * len(rows) + 4, "".join(parts), title)


@dataclass(frozen=True)
class Strip:
    label: str
    values: tuple[tuple[float, str, str], ...]  # value, whose colour, tip
    median: float


def strips(
    title: str, x_label: str, rows: Sequence[Strip], width: int = 640, names: Sequence[str] = ()
) -> str:
    """A row of marks for each strip on one logarithmic axis, with a line at 1 and a tick at the median.

    Labels stand to the left of the marks or, where that leaves them too little room, above them. The legend
    has the given names.
    """
    longest = round(6.4 * max((len(row.label) for row in rows), default=0))
    above = width < longest + 300
    left, right = (10, 10) if above else (20 + longest, 52)
    step, label, marks = (52, 12, 35) if above else (32, 16, 16)  # the last two below a strip's upper edge
    legend, top = _names(names, width, 34)
    scale = axis(x_label, [value for row in rows for value, *_ in row.values] + [0.8, 1.25], log=True)
    room = width - left - right
    bottom = top + step * len(rows)

    def at(value: float) -> float:
        return left + room * scale.place(value)

    parts = [f'<text class="title" x="6" y="16">{escape(title)}</text>', legend]
    for tick in scale.ticks:
        parts.append(f'<path class="grid" d="M{at(tick):.1f} {top}V{bottom}"/>')
        parts.append(
            f'<text x="{at(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{tick_text(tick)}</text>'
        )
    parts.append(f'<path class="axis" d="M{at(1):.1f} {top - 4}V{bottom}"/>')
    parts.append(f'<text x="{width - 6}" y="{bottom + 31}" text-anchor="end">{escape(x_label)}</text>')
    for n, row in enumerate(rows):
        text, y = top + step * n + label + 4, top + step * n + marks
        parts.append(f'<text class="value" x="6" y="{text}">{escape(row.label)}</text>')
        for index, (value, name, tip) in enumerate(row.values):
            offset = (index % 3 - 1) * 5  # beside each other where they would lie on each other
            parts.append(f'<g opacity=".8">{marker(name, at(value), y + offset, tip, size=3.6)}</g>')
        x = at(row.median)
        parts.append(f'<path stroke="var(--ink)" stroke-width="2" d="M{x:.1f} {y - 11:.1f}v22"/>')
        median = f"{row.median:.2f}×"
        parts.append(f'<text class="value" x="{width - 6}" y="{text}" text-anchor="end">{median}</text>')
    return _svg(width, bottom + 38, "".join(parts), title)


def _names(names: Sequence[str], width: int, y: int) -> tuple[str, int]:
    """Names with their markers, in lines of this width, and where what follows begins."""
    parts, x = [], 12.0
    for name in names:
        wide = 32 + 7.4 * len(name)
        if x + wide > width:
            x, y = 12.0, y + 18
        parts.append(marker(name, x, y))
        parts.append(f'<text class="value" x="{x + 12:.0f}" y="{y + 4}">{escape(name)}</text>')
        x += wide
    return "".join(parts), y + 20 if names else y - 4


# Several in one picture


def grid(
    charts: Sequence[Chart], columns: int, names: Sequence[str], cell: tuple[int, int] = (340, 240)
) -> str:
    """Charts in rows under one legend, which has lines as the charts do."""
    width, top = cell[0] * columns, 30
    parts, x = [], 12.0
    known = {series.name: series for chart in charts for series in chart.series}
    for name in names:
        shown = known.get(name) or Series(name, ())
        if shown.joined:
            parts.append(f'<path class="line" stroke="{colour(name)}"{_dash(shown)} d="M{x:.0f} 15h24"/>')
        parts.append(marker(name, x + 12, 15))
        parts.append(f'<text class="value" x="{x + 30:.0f}" y="19">{escape(name)}</text>')
        x += 54 + 6.4 * len(name)
    for n, chart in enumerate(charts):
        place = f"translate({cell[0] * (n % columns)} {top + cell[1] * (n // columns)})"
        parts.append(f'<g transform="{place}">{_body(chart, *cell)}</g>')
    height = top + cell[1] * -(-len(charts) // columns)
    svg = _svg(width, height, "".join(parts), ", ".join(names))
    return svg.replace("<svg ", f'<svg width="{width}" height="{height}" ', 1)
