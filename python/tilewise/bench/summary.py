"""What the rows of records say together: who is faster where, and a conclusion in a few sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise.bench import suites
from tilewise.bench.operations.operation import words
from tilewise.bench.records import Line, Record, problem_of
from tilewise.bench.table import digits, machine, rate, share, threads_of
from tilewise.bench.words import line_words, type_of, type_words

LADDER = (  # slowest first
    *("reference", "simd", "naive", "tiled", "triton", "fused", "wide", "simt", "split", "mma", "wgmma"),
    *("cublaslt", "chunked", "few_rows", "tilewise", "tilewise graph"),
)
PEERS = (  # and all of torch's
    *("flash-attn", "flash-attn 3", "flash-attn 4", "xformers", "flashinfer"),
    "hugging face",
)
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
    """The problem of a line, as short as it can be said."""
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
    slower: int
    median: float
    low: float
    high: float


def standing(of: Sequence[Race]) -> Standing | None:
    gains = [race.speed_up for race in of if race.speed_up]
    if not gains:
        return None
    faster, slower = sum(gain > 1 for gain in gains), sum(gain < 1 for gain in gains)
    return Standing(len(gains), faster, slower, statistics.median(gains), min(gains), max(gains))


def by_suite(of: Sequence[Race]) -> dict[tuple[str, str, str], list[Race]]:
    """Races by suite, pass and type (TF32 apart from f32), in the order of the record."""
    found: dict[tuple[str, str, str], list[Race]] = {}
    for race in of:
        key = race.first["suite"], race.first["pass"], type_of(race.first)
        found.setdefault(key, []).append(race)
    return found


ATTENTION, LAYER = "Attention", "The layer around attention"
_TYPES, _PASSES = ("bf16", "f16", "f32", "tf32"), ("forward", "backward", "both")


def by_kind(of: Sequence[Race]) -> dict[tuple[str, str, str], Standing]:
    """Standings by what is computed (attention, or the layer around it), type and pass."""
    found: dict[tuple[str, str, str], list[Race]] = {}
    for race in of:
        what = ATTENTION if race.first["op"] == "attention" else LAYER
        found.setdefault((what, type_of(race.first), race.first["pass"]), []).append(race)

    def place(key: tuple[str, str, str]) -> tuple[int, ...]:
        what, dtype, direction = key
        types = _TYPES.index(dtype) if dtype in _TYPES else len(_TYPES)
        return what != ATTENTION, types, _PASSES.index(direction) if direction in _PASSES else len(_PASSES)

    return {key: stand for key in sorted(found, key=place) if (stand := standing(found[key]))}


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


# The conclusion


def conclusion(record: Record) -> list[str]:
    """Speed against peers; where it is behind; what of the machine is used; exactness and memory."""
    of = races(record.rows)
    return [*_speeds(record, of), *behind(of), use(of), exactness(of)]


def _speeds(record: Record, of: Sequence[Race]) -> list[str]:
    where = record.machine
    if record.environment.get("device") == "cpu" and (threads := record.environment.get("threads")):
        where += f" with {threads_of(threads)}"
    stand = standing(of)
    if stand is None:
        count = sum(race.best_ours is not None for race in of)
        problems = "1 problem" if count == 1 else f"{count} problems"
        return [f"On {where}, Tilewise was measured on {problems} and compared with nothing else."]
    times = f"{stand.median:.2f} times as fast as the fastest peer"
    if stand.count == 1:
        return [f"On {where}, Tilewise is {times} on the one problem measured."]
    kinds = by_kind(of)
    if len(kinds) == 1:
        return [
            f"On {where}, Tilewise is {times} in the median of {stand.count} problems "
            f"({stand.low:.2f} to {stand.high:.2f}) and ahead in {stand.faster} of them."
        ]
    sentences = [f"On {where}, times as fast as the fastest peer of each problem, in the median:"]
    for what in (ATTENTION, LAYER):
        parts = [
            f"{type_words(dtype)} {direction} {one.median:.2f} (ahead in {one.faster} of {one.count})"
            for (kind, dtype, direction), one in kinds.items()
            if kind == what
        ]
        sentences += [f"{what}: {'; '.join(parts)}."] if parts else []
    return sentences


MOST_GROUPS = 6  # that a sentence names


def behind(of: Sequence[Race]) -> list[str]:
    """A sentence about the problems in which a peer is faster; none where nothing was compared."""
    gains = [(race.speed_up, race) for race in of if race.speed_up]
    slower = [race for gain, race in gains if gain < 1]
    if not gains:
        return []
    if not slower:
        return [f"It is behind the fastest peer in none of {len(gains)} problems."]
    worst = min(slower, key=lambda race: race.speed_up or 0.0)
    assert worst.best_peer is not None and worst.speed_up is not None
    sentence = f"It is behind the fastest peer in {len(slower)} of {len(gains)} problems"
    groups = [
        (stand.median, f"{suite} {type_words(dtype)} {direction} ({_below_one(stand.median)})")
        for (suite, direction, dtype), members in by_suite(of).items()
        if (stand := standing(members)) and stand.median < 1
    ]
    if groups:
        named = [words for _, words in sorted(groups)]
        more = f" and {len(named) - MOST_GROUPS} more" if len(named) > MOST_GROUPS else ""
        sentence += f". In the median of a suite it is behind in {', '.join(named[:MOST_GROUPS])}{more}"
    furthest = f"{_below_one(worst.speed_up)} times as fast as {worst.best_peer['impl']}"
    return [f"{sentence}. It is furthest behind at {line_words(worst.first)}: {furthest}."]


def _below_one(times: float) -> str:
    """Who is behind by a hair is not "1.00 times as fast".

    >>> _below_one(0.35), _below_one(0.9962), _below_one(0.99999)
    ('0.35', '0.996', '0.999')
    """
    rounded = f"{times:.2f}"
    return rounded if rounded != "1.00" else f"{min(times, 0.999):.3f}"


def use(of: Sequence[Race]) -> str:
    """The highest rates, beside those of plain programs on the machine."""
    best = [race.best_ours for race in of if race.best_ours]
    if not best:
        return "None of its kernels ran, so there is no rate to compare with the machine's."
    top = max(best, key=lambda line: line["tflops"])
    sentence = f"Its highest rate is {_rate_of(top)}"
    split = [x for x in best if type_of(x) == "f32" and x is not top and "(split" in x.get("yardstick", "")]
    if split and (most := max(split, key=lambda line: line["tflops"])):
        sentence += f"; in f32 it is {_rate_of(most)}"
    read = max(best, key=lambda line: line.get("percent_of_copy") or 0.0)
    if (read.get("percent_of_copy") or 0) >= 5 and read is not top:
        sentence += (
            f"; where bytes count most ({line_words(read)}) it moves {digits(read['gbps'])} GB/s, "
            f"{share(read['percent_of_copy'])} a copy's rate"
        )
    return sentence + "."


def _rate_of(line: Line) -> str:
    sentence = f"{rate(line['tflops'])} ({line['impl']}: {line_words(line)})"
    if line.get("percent_of_peak"):
        sentence += f", {share(line['percent_of_peak'])} {line.get('yardstick', 'a matrix product')}"
    return sentence


def exactness(every: Sequence[Race]) -> str:
    """Errors beside PyTorch's, and the memory that is saved."""
    of = [race for race in every if type_of(race.first) != "tf32"]  # whose error is that of TF32
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
        f"in the median of {len(pairs)} {'problem' if len(pairs) == 1 else 'problems'}"
    )
    saved = [
        (math["peak_mb"], race.best_ours["peak_mb"], race.best_ours)
        for race in of
        if race.best_ours and race.best_ours.get("peak_mb") and (math := race.math) and math.get("peak_mb")
    ]
    if saved:
        math_mb, our_mb, line = max(saved, key=lambda entry: entry[0])
        sentence += (
            f", and it takes {digits(our_mb)} MB where that takes {digits(math_mb)} MB ({line_words(line)})"
        )
    return sentence + "."


# Text


def text(records: Sequence[Record]) -> str:
    """The conclusion and a table: how each suite stands."""
    lines: list[str] = []
    for record in records:
        if not record.rows:
            continue
        lines += ["", machine(record.environment), *conclusion(record)]
        lines += [warning, ""] if (warning := busy(record)) else [""]
        title = "suite, pass, type"
        lines.append(
            f"{title:38}{'problems':>9}{'ahead':>7}{'median':>8}{'low':>7}{'high':>7}  times as fast as"
        )
        for (suite, direction, dtype), of in by_suite(races(record.rows)).items():
            stand = standing(of)
            name = f"{suite}, {direction}, {type_words(dtype)}"
            if stand is None:
                lines.append(f"{name:38}{len(of):>9}  nothing to compare with")
                continue
            peers = sorted({race.best_peer["impl"] for race in of if race.best_peer})
            lines.append(
                f"{name:38}{stand.count:>9}{stand.faster:>7}{stand.median:>8.2f}{stand.low:>7.2f}"
                f"{stand.high:>7.2f}  {', '.join(peers)}"
            )
    return "\n".join(lines[1:])


def by_machine(records: Sequence[Record]) -> list[Record]:
    """Records of one machine as one, with every rate and row, in the order in which suites are shown.

    Each row says what it is compared with: a rate of its own run, or of another one on the machine.
    """
    parts: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        parts.setdefault(record.machine_and_device, []).append(record)
    return [_merged(of) for of in parts.values()]


def _merged(records: Sequence[Record]) -> Record:
    first = next((record for record in records if record.rows), records[0])
    into = Record(environment=first.environment, source=first.source, parts=list(records))
    for record in records:
        into.rates += record.rates
        into.profiles += record.profiles
        into.rows += record.rows
    into.rows = sorted(
        (_beside_yardstick(line, record, into) for record in records for line in record.rows),
        key=lambda line: suites.rank(line["suite"]),
    )
    return into


def _beside_yardstick(line: Line, own: Record, every: Record) -> Line:
    other = own.yardstick(line) or every.yardstick(line) if line.get("ms") else None
    if other is None:
        return line
    percent = 100 * line["tflops"] / other.tflops
    return {**line, "peak_tflops": other.tflops, "percent_of_peak": percent, "yardstick": other.what}
