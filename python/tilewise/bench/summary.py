"""What the rows of records say together: who is faster where, and a conclusion in three sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise.bench.operations.operation import words
from tilewise.bench.records import Line, Record, problem_of
from tilewise.bench.table import digits, machine, rate

LADDER = (  # slowest first
    *("reference", "simd", "naive", "tiled", "fused", "wide", "simt", "split", "mma", "wgmma"),
    *("cublaslt", "chunked", "few_rows", "tilewise", "tilewise graph"),
)
PEERS = ("flash-attn", "flash-attn 3", "xformers", "flashinfer")  # and all of torch's
SLOW_KERNELS = ("naive", "reference")  # there to be read: plots come with and without them
MATH = ("torch math", "torch eager")  # PyTorch's arithmetic, of attention and of the other operations


def is_peer(impl: str) -> bool:
    return impl.startswith("torch ") or impl in PEERS


def ours(line: Line) -> bool:
    return not is_peer(line["impl"])


def shape_of(line: Line) -> str:
    """As `Problem.shape`, of a record's line; other operations have their sizes by name."""
    if "sizes" in line:
        return words(line["op"], line["sizes"])
    heads = f"h{line['hq']}" if line["hq"] == line["hkv"] else f"h{line['hq']}/{line['hkv']}"
    length = f"s{line['sq']}" if line["sq"] == line["sk"] else f"sq{line['sq']} sk{line['sk']}"
    value_dim = f" dv{line['dv']}" if line["dv"] != line["d"] else ""
    return (f"b{line['b']} " if line["b"] != 1 else "") + f"{heads} {length} d{line['d']}{value_dim}"


def name_of(line: Line) -> str:
    """The problem of a line, in words."""
    words = [shape_of(line), line.get("features", ""), "causal" if line["causal"] else ""]
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Race:
    """All lines of one problem on one machine."""

    lines: tuple[Line, ...]

    @property
    def first(self) -> Line:
        return self.lines[0]

    def timed(self, of_ours: bool) -> list[Line]:
        return [line for line in self.lines if line.get("ms") and ours(line) == of_ours]

    @property
    def best_ours(self) -> Line | None:
        return min(self.timed(True), key=lambda line: line["ms"], default=None)

    @property
    def best_peer(self) -> Line | None:
        return min(self.timed(False), key=lambda line: line["ms"], default=None)

    def get(self, impl: str) -> Line | None:
        return next((line for line in self.lines if line["impl"] == impl and line.get("ms")), None)

    @property
    def math(self) -> Line | None:
        """PyTorch's own arithmetic, whose error is the measure."""
        return next((line for name in MATH if (line := self.get(name))), None)

    @property
    def speed_up(self) -> float | None:
        """The best peer's time over that of our best kernel."""
        us, peer = self.best_ours, self.best_peer
        return peer["ms"] / us["ms"] if us and peer else None


def races(rows: Iterable[Line]) -> list[Race]:
    found: dict[str, list[Line]] = {}
    for line in rows:
        found.setdefault(problem_of(line), []).append(line)
    return [Race(tuple(lines)) for lines in found.values()]


@dataclass(frozen=True)
class Standing:
    """How we stand against the best peer over some problems."""

    count: int
    faster: int
    median: float
    low: float
    high: float


def standing(of: Sequence[Race]) -> Standing | None:
    gains = [race.speed_up for race in of if race.speed_up]
    if not gains:
        return None
    faster = sum(gain > 1 for gain in gains)
    return Standing(len(gains), faster, statistics.median(gains), min(gains), max(gains))


def by_suite(of: Sequence[Race]) -> dict[tuple[str, str, str], list[Race]]:
    """Races by suite, pass and type, in the order of the record."""
    found: dict[tuple[str, str, str], list[Race]] = {}
    for race in of:
        key = race.first["suite"], race.first["pass"], race.first["dtype"]
        found.setdefault(key, []).append(race)
    return found


def busy(record: Record) -> str | None:
    """A warning where somebody else had the machine: times that differ much, or a thread without a core."""
    spreads = [line["spread"] for line in record.rows if line.get("spread")]
    shares = [line["cpu_share"] for line in record.rows if line.get("cpu_share")]
    if spreads and (median := statistics.median(spreads)) >= 0.2:
        sign = f"half of the rows have a spread of {100 * median:.0f} % or more"
    elif shares and (median := statistics.median(shares)) < 0.95:
        sign = f"in half of the rows the thread had a core for {100 * median:.0f} % of the time or less"
    else:
        return None
    return f"The machine was busy with something else: {sign}. Measure again in a quieter moment."


# Three sentences


def conclusion(record: Record) -> list[str]:
    """Speed against peers; what of the machine is used; exactness and memory. From one machine's rows."""
    of = races(record.rows)
    return [_speed(record, of), _use(record, of), _exactness(of)]


def _speed(record: Record, of: Sequence[Race]) -> str:
    where = record.machine
    if record.environment.get("device") == "cpu" and (threads := record.environment.get("threads")):
        where += f" with {threads} threads"
    stand = standing(of)
    if stand is None:
        count = sum(race.best_ours is not None for race in of)
        return f"On {where}, Tilewise was measured on {count} problems, and nothing else beside it."
    times = f"{digits(stand.median)} times as fast as the fastest peer"
    if stand.count == 1:
        return f"On {where}, Tilewise is {times} on the one problem measured."
    return (
        f"On {where}, Tilewise is {times} in the median of {stand.count} problems "
        f"({digits(stand.low)} to {digits(stand.high)}) and ahead in {stand.faster} of them."
    )


def _use(record: Record, of: Sequence[Race]) -> str:
    best = [race.best_ours for race in of if race.best_ours]
    if not best:
        return "None of its kernels ran, so there is no rate to hold against the machine's."
    top = max(best, key=lambda line: line["tflops"])
    sentence = f"Its highest rate is {rate(top['tflops'])} ({top['impl']}, {_words(top)})"
    if top.get("percent_of_peak"):
        against = "matrix product" if top["dtype"] != "f32" or "cpu" in record.environment else "arithmetic"
        sentence += f", {digits(top['percent_of_peak'], 2)} % of the {against} rate measured beside it"
    read = max(best, key=lambda line: line.get("percent_of_copy") or 0.0)
    if (read.get("percent_of_copy") or 0) >= 5 and read is not top:
        sentence += (
            f"; where bytes count most ({_words(read)}) it moves {digits(read['gbps'])} GB/s, "
            f"{digits(read['percent_of_copy'], 2)} % of a copy"
        )
    return sentence + "."


def _exactness(of: Sequence[Race]) -> str:
    pairs = [
        (race.best_ours["error"], math["error"])
        for race in of
        if race.best_ours and race.best_ours.get("error") and (math := race.math) and math.get("error")
    ]
    if not pairs:
        errors = [race.best_ours["error"] for race in of if race.best_ours and race.best_ours.get("error")]
        worst = max(errors, default=None)
        return "No error was measured." if worst is None else f"Its largest error is {worst:.1e}."
    ratio = statistics.median(us / math for us, math in pairs)
    sentence = (
        f"Against float64 its largest error is {digits(ratio, 2)} times that of PyTorch's math path "
        f"in the median of {len(pairs)} problems"
    )
    saved = [
        (math["peak_mb"], race.best_ours["peak_mb"], race.best_ours)
        for race in of
        if race.best_ours and race.best_ours.get("peak_mb") and (math := race.math) and math.get("peak_mb")
    ]
    if saved:
        math_mb, our_mb, line = max(saved, key=lambda entry: entry[0])
        sentence += (
            f", and it takes {digits(our_mb)} MB where that takes {digits(math_mb)} MB ({_words(line)})"
        )
    return sentence + "."


def _words(line: Line) -> str:
    return f"{name_of(line)}, {line['dtype']} {line['pass']}"


# Text


def text(records: Sequence[Record]) -> str:
    """The conclusion and a table: how each suite stands."""
    lines: list[str] = []
    for record in records:
        lines += ["", machine(record.environment), *conclusion(record)]
        lines += [warning, ""] if (warning := busy(record)) else [""]
        title = "suite, pass, type"
        lines.append(
            f"{title:34}{'problems':>9}{'ahead':>7}{'median':>8}{'low':>7}{'high':>7}  times as fast as"
        )
        for (suite, direction, dtype), of in by_suite(races(record.rows)).items():
            stand = standing(of)
            name = f"{suite}, {direction}, {dtype}"
            if stand is None:
                lines.append(f"{name:34}{len(of):>9}  nothing to compare with")
                continue
            peers = sorted({race.best_peer["impl"] for race in of if race.best_peer})
            lines.append(
                f"{name:34}{stand.count:>9}{stand.faster:>7}{stand.median:>8.2f}{stand.low:>7.2f}"
                f"{stand.high:>7.2f}  {', '.join(peers)}"
            )
    return "\n".join(lines[1:])


def by_machine(records: Sequence[Record]) -> list[Record]:
    """Records of one machine as one, with every rate and row."""
    merged: dict[tuple[str, str], Record] = {}
    for record in records:
        key = (
            record.machine,
            record.environment.get("device") or ("cuda" if "gpu" in record.environment else "cpu"),
        )
        into = merged.setdefault(key, Record(environment=record.environment, source=record.source))
        into.rates += record.rates
        into.rows += record.rows
    return list(merged.values())
