"""Which charts a machine's rows give: the ladder, speed against peers, growth, roofline, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewise.bench import charts
from tilewise.bench.charts import Bar, Chart, Series, Strip
from tilewise.bench.operations.operation import words
from tilewise.bench.records import Line, Record
from tilewise.bench.summary import (
    LADDER,
    SLOW_KERNELS,
    Race,
    by_suite,
    is_peer,
    ours,
    races,
    standing,
)
from tilewise.bench.table import digits, rate, unit
from tilewise.bench.words import line_words, problem_words, type_of, type_words


@dataclass(frozen=True)
class Metric:
    key: str  # in file names and the page
    title: str
    unit: str
    value: Callable[[Race, Line], float | None]
    log: bool = True


def _field(name: str) -> Callable[[Race, Line], float | None]:
    return lambda race, line: line.get(name)


def _against_peer(race: Race, line: Line) -> float | None:
    return race.best_peer["ms"] / line["ms"] if race.best_peer and ours(line) else None


METRICS = (
    Metric("throughput", "Throughput", "TFLOP/s", lambda _, line: line["tflops"] * unit(line)[1]),
    Metric("latency", "Latency", "ms", _field("ms")),
    Metric("speed-up", "Speed-up", "times the fastest peer", _against_peer),
    Metric("bandwidth", "Bandwidth", "GB/s, inputs and results once", _field("gbps")),
    Metric("memory", "Memory", "MB a call allocates", _field("peak_mb")),
    Metric("error", "Error", "largest, against float64", _field("error")),
)


def order(names: set[str]) -> list[str]:
    """Our kernels as a ladder, then the peers."""
    return sorted(
        names, key=lambda name: (is_peer(name), LADDER.index(name) if name in LADDER else len(LADDER), name)
    )


# Growth

_LABELS = {"sq": "sequence length", "sk": "keys", "d": "head dim", "m": "rows", "tokens": "tokens"}


@dataclass(frozen=True)
class Growth:
    """Races that differ in one size alone (and the batch or the heads that make up for it)."""

    suite: str
    title: str
    size: str  # sq, sk or d; m or tokens of other operations
    races: tuple[Race, ...]

    @property
    def impls(self) -> list[str]:
        return order({line["impl"] for race in self.races for line in race.lines if line.get("ms")})

    def chart(self, metric: Metric, without: Sequence[str] = ()) -> Chart | None:
        """The metric over the size, a line an implementation; None where nothing has it."""
        series = []
        for impl in self.impls:
            if impl in without:
                continue
            points, tips = [], []
            for race in self.races:
                line = race.get(impl)
                value = metric.value(race, line) if line else None
                if line and value:
                    points.append((self._size(line), value))
                    tips.append(f"{impl}: {digits(value)} {self._unit(metric)} at {problem_words(line)}")
            if points:
                series.append(Series(impl, tuple(points), tuple(tips), dashed=is_peer(impl)))
        if not series:
            return None
        sizes = sorted({self._size(race.first) for race in self.races})
        label = _LABELS[self.size]
        x = charts.axis(label, sizes, log=True, ticks=sizes)
        values = [y for one in series for _, y in one.points]
        rules: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
        if metric.key == "speed-up":
            values += [0.8, 1.25]
            rules = (("", ((x.low, 1.0), (x.high, 1.0))),)
        name = self._unit(metric)
        return Chart(self.title, x, charts.axis(name, values, metric.log), tuple(series), rules)

    def _size(self, line: Line) -> float:
        return float(line.get("sizes", line)[self.size])

    def _unit(self, metric: Metric) -> str:
        return unit(self.races[0].first)[0] if metric.key == "throughput" else metric.unit


def growths(of: Sequence[Race]) -> list[Growth]:
    """Families of at least three sizes, by length where there are so many, else by head dim."""
    families: dict[tuple[object, ...], list[Race]] = {}
    for race in of:
        line = race.first
        if "sizes" in line:
            continue
        shared = (line["suite"], line["pass"], type_of(line), line["causal"], line.get("features", ""))
        batch = line["b"] if line["sq"] == 1 else None
        threads = line.get("threads")
        families.setdefault(
            ("length", *shared, line["hq"], line["hkv"], line["d"], line["dv"], batch, threads), []
        ).append(race)
        families.setdefault(("dim", *shared, line["sq"], line["sk"], line["b"], threads), []).append(race)
    found = []
    for key, members in families.items():
        first = members[0].first
        size = "d" if key[0] == "dim" else "sk" if first["sq"] == 1 else "sq"
        members.sort(key=lambda race: race.first[size])
        sizes = {race.first[size] for race in members}
        if len(sizes) < (4 if size == "d" else 3) or len(sizes) != len(members):
            continue
        found.append(Growth(first["suite"], _family_title(first, size), size, tuple(members)))
    return found + _operation_growths([race for race in of if "sizes" in race.first])


def _operation_growths(of: Sequence[Race]) -> list[Growth]:
    """Of operations around attention: by rows or tokens, all other sizes the same."""
    families: dict[tuple[str, ...], list[Race]] = {}
    for race in of:
        line = race.first
        if size := next((size for size in ("m", "tokens") if size in line["sizes"]), None):
            same = words(line["op"], {key: x for key, x in line["sizes"].items() if key != size})
            title = f"{line['pass']} · {type_words(type_of(line))} · {same}"
            families.setdefault((line["suite"], title, size), []).append(race)
    found = []
    for (suite, title, size), members in families.items():
        members.sort(key=lambda race: race.first["sizes"][size])
        if len(members) >= 3:
            found.append(Growth(suite, title, size, tuple(members)))
    return found


def _family_title(line: Line, size: str) -> str:
    heads = str(line["hq"]) if line["hq"] == line["hkv"] else f"{line['hq']}/{line['hkv']}"
    sizes = f"{heads} heads × {line['d']}" if size != "d" else f"length {line['sq']}"
    dtype = type_words(type_of(line))
    words = [line["pass"], "causal" if line["causal"] else "", dtype, sizes, line.get("features", "")]
    if line.get("threads") and line["device"] == "cpu" and "level" in line:
        words.append(f"{line['threads']} thread{'s' if line['threads'] > 1 else ''}")
    return " · ".join(word for word in words if word)


# The ladder


def ladders(of: Sequence[Race]) -> list[str]:
    """Bars for both passes: the race in which most of our kernels took part, of these the largest."""
    drawings = []
    for direction in ("forward", "backward", "both"):
        timed = [race for race in of if race.first["pass"] == direction and race.timed(True)]
        if not timed:
            continue
        race = max(
            timed,
            key=lambda race: (
                race.first["op"] == "attention",
                len(race.timed(True)),
                bool(race.timed(False)),
                race.first["suite"] == "ladder",
                max(line["ms"] for line in race.timed(True)),
            ),
        )
        lines = sorted(race.timed(True) + race.timed(False), key=lambda line: -line["ms"])
        rows = [Bar(line["impl"], line["impl"], line["tflops"], rate(line["tflops"])) for line in lines]
        dtype = type_words(type_of(race.first))
        drawings.append(charts.bars(f"{dtype} {direction}", rows, problem_words(race.first)))
    return drawings


# Against peers


def against_peers(of: Sequence[Race], width: int = 640, legend: bool = False) -> str | None:
    """Every problem a mark: the fastest peer's time over that of our fastest kernel."""
    rows = []
    for (suite, direction, dtype), members in by_suite(of).items():
        stand = standing(members)
        if stand is None:
            continue
        values = []
        for race in members:
            us, peer, gain = race.best_ours, race.best_peer, race.speed_up
            if us and peer and gain:
                times = [f"{line['impl']} {digits(line['ms'])} ms" for line in (us, peer)]
                tip = f"{line_words(us)}: {', '.join(times)}"
                values.append((gain, us["impl"], tip))
        rows.append(Strip(f"{suite} · {direction} · {type_words(dtype)}", tuple(values), stand.median))
    if not rows:
        return None
    title = "Speed against the fastest peer" + (", problem by problem" if width >= 400 else "")
    names = order({name for row in rows for _, name, _ in row.values}) if legend else ()
    return charts.strips(title, "times as fast", rows, width, names)


# Roofline


def roofline(record: Record, of: Sequence[Race]) -> list[Chart]:
    """For each type, TF32 apart: FLOPs a byte against the rate, under the machine's measured rates.

    On a GPU f32 has two roofs: that of multiply-adds, and that of numbers split for the tensor cores.
    """
    found = []
    for dtype in ("f32", "tf32", "f16", "bf16"):
        lines = [
            line
            for race in of
            if type_of(race.first) == dtype
            for line in race.lines
            if line.get("ms") and line.get("gbps") and line["impl"] not in SLOW_KERNELS
        ]
        roofs, copy = _roofs(record, dtype, lines), record.copy_rate
        if not lines or not roofs or not copy:
            continue
        series = []
        for impl in order({line["impl"] for line in lines}):
            own = [line for line in lines if line["impl"] == impl]
            points = tuple((intensity(line), line["tflops"] * unit(line)[1]) for line in own)
            tips = tuple(
                f"{impl}: {digits(intensity(line))} FLOP a byte, {rate(line['tflops'])} at {line_words(line)}"
                for line in own
            )
            series.append(Series(impl, points, tips, joined=False))
        name, scale = unit(lines[0])
        highest = max(roofs.values())
        values = [intensity(line) for line in lines]
        x = charts.axis("FLOP for each byte of inputs and results", [*values, 1e3 * highest / copy], log=True)
        y = charts.axis(name, [line["tflops"] * scale for line in lines] + [highest * scale], log=True)
        start = max(x.low, 1e3 * y.low / scale / copy)
        slope = (start, start * copy * 1e-3 * scale)
        rules = tuple((label, _roof(slope, roof, scale, copy, x.high)) for label, roof in roofs.items())
        title = f"{type_words(dtype)}: {rate(highest)}, copy {digits(copy)} GB/s"
        found.append(Chart(title, x, y, tuple(series), rules))
    return found


def _roof(
    start: tuple[float, float], roof: float, scale: float, copy: float, end: float
) -> tuple[tuple[float, float], ...]:
    """From where the drawing begins, up to the ridge and on; flat alone where the ridge is left of it."""
    ridge, height = 1e3 * roof / copy, roof * scale
    rising = (start, (ridge, height)) if ridge > start[0] else ((start[0], height),)
    return (*rising, (end, height))


def _roofs(record: Record, dtype: str, lines: Sequence[Line]) -> dict[str, float]:
    """The flat roofs over lines of a type, by what they are called in the drawing."""
    compute = record.compute_rate("f32" if dtype == "tf32" else dtype)
    if dtype not in ("f32", "tf32") or not any(line["device"] == "cuda" for line in lines):
        return {"": compute} if compute else {}
    found = {f"multiply-adds {rate(compute)}": compute} if compute else {}
    if split := record.split_rate:
        tensor = split * (1 if dtype == "f32" else 3)
        found[f"{'split' if dtype == 'f32' else 'f16'} products {rate(tensor)}"] = tensor
    return found


def intensity(line: Line) -> float:
    """FLOPs for each byte that cannot be helped, of a line."""
    return 1e3 * line["tflops"] / line["gbps"]


def roof_of(record: Record, line: Line) -> tuple[float, str] | None:
    """The roof at the line's intensity, in TFLOP/s, and which measured rate it comes from."""
    other, copy = record.yardstick(line), record.copy_rate
    compute = line["peak_tflops"] if "yardstick" in line else other.tflops if other else None
    if not compute or not copy:
        return None
    by_memory = intensity(line) * copy * 1e-3
    return (by_memory, "memory") if by_memory < compute else (compute, "arithmetic")


# Exactness


def exactness(of: Sequence[Race]) -> Chart | None:
    """Our errors against those of PyTorch's math path on the same inputs, and the line of twice those."""
    points: dict[str, list[tuple[float, float]]] = {}
    tips: dict[str, list[str]] = {}
    for race in of:
        math = race.math if type_of(race.first) != "tf32" else None  # TF32 is meant to have less digits
        for line in race.timed(True):
            if math and math.get("error") and line.get("error"):
                points.setdefault(line["impl"], []).append((math["error"], line["error"]))
                tips.setdefault(line["impl"], []).append(
                    f"{line['impl']}: {line['error']:.1e}, math {math['error']:.1e} at {line_words(line)}"
                )
    if not points:
        return None
    every = [point for of_impl in points.values() for point in of_impl]
    x = charts.axis("error of PyTorch's math path", [x for x, _ in every], log=True)
    y = charts.axis("error of ours", [y for _, y in every] + [2 * x for x, _ in every], log=True)
    low = max(x.low, y.low / 2)
    high = min(x.high, y.high / 2)
    series = tuple(
        Series(impl, tuple(points[impl]), tuple(tips[impl]), joined=False) for impl in order(set(points))
    )
    rules = (("twice as much", ((low, 2 * low), (high, 2 * high))),)
    return Chart("Largest error, ours against PyTorch's", x, y, series, rules)


def all_files(record: Record) -> dict[str, str]:
    """Every plot as an SVG file's text, by name."""
    of = races(record.rows)
    files = {f"ladder-{n + 1}": svg for n, svg in enumerate(ladders(of))}
    if strips := against_peers(of):
        files["against-peers"] = strips
    for group in growths(of):
        stem = charts.slug(f"{group.suite} {group.title}").replace("--", "-").replace("--", "-")
        for metric in METRICS:
            slow = [impl for impl in group.impls if impl in SLOW_KERNELS]
            if chart := group.chart(metric):
                files[f"{metric.key}-{stem}"] = charts.draw(chart, 460, 300)
            if slow and metric.key in ("latency", "throughput") and (chart := group.chart(metric, slow)):
                files[f"{metric.key}-{stem}-without-{slow[0]}"] = charts.draw(chart, 460, 300)
    for chart in roofline(record, of):
        files[f"roofline-{chart.title.split(':')[0]}"] = charts.draw(chart, 620, 380)
    if chart := exactness(of):
        files["error"] = charts.draw(chart, 460, 360)
    return {name: charts.standalone(svg) for name, svg in files.items()}
