"""What README and docs/benchmarks.md show: how Tilewise stands beside its peers on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tilewise.bench import charts, summary
from tilewise.bench.charts import Chart, Series
from tilewise.bench.records import Line, Record, about, days
from tilewise.bench.summary import Race, races
from tilewise.bench.words import type_words

NOTHING = "Nothing has been recorded beside a peer yet."
GRID = "flash-attention-grid"
MODELS = ("llama", "vit")
INSTALLED = {"flash-attn 3": "FlashAttention-3", "flash-attn 4": "FlashAttention-4"}
PEERS = ("torch cudnn", "torch flash", *INSTALLED)  # as far as a record has them
OURS = "tilewise"
HEAD = (
    "| suite | pass | type | median | ahead in | range | day |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: |",
)

# Suites whose problems are of one kind, in the order of README's table.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention: models, FlashAttention's grid", (GRID, *MODELS)),
    ("attention in f32", ("f32", "ladder", *MODELS)),
    ("the same, TF32 allowed", ("tf32",)),
    ("attention, one query over a cache", ("decode",)),
    ("attention with masks or dropout", ("masks",)),
    ("attention with windows or block masks", ("sparse",)),
    ("attention, head dims 16 to 4096", ("head-dims",)),
    ("deterministic gradients, beside FlashAttention-2", ("deterministic",)),
    ("whole layers and decode steps", ("layer",)),
    ("feed-forward networks", ("ffn",)),
    ("norms and rotary embedding", ("norm",)),
    ("layer and network, against compiled PyTorch", ("compiled-pytorch",)),
)


def slug(record: Record) -> str:
    return charts.slug(record.machine).strip("-")


# The picture


def speed_plot(record: Record) -> str | None:
    """TFLOP/s over the length, causal bf16: a row for each pass, a column for each head dim."""
    grid = [
        race
        for race in races(record.rows)
        if race.first["suite"] == GRID and race.first["dtype"] == "bf16" and race.first["causal"]
    ]
    dims = sorted({race.first["d"] for race in grid})
    if not dims:
        return None
    high = max(line["tflops"] for race in grid for line in _shown(race).values())
    drawn = []
    for direction in ("forward", "backward"):
        for dim in dims:
            of = [race for race in grid if (race.first["pass"], race.first["d"]) == (direction, dim)]
            of.sort(key=lambda race: race.first["sq"])
            drawn.append(_chart(f"{direction}, head dim {dim}", of, high))
    return charts.grid(drawn, len(dims), (OURS, *(name for name in PEERS if any(map(_has(name), grid)))))


def _has(name: str) -> Callable[[Race], bool]:
    return lambda race: race.get(name) is not None


def _shown(race: Race) -> dict[str, Line]:
    """The line of each series that the race has: our fastest kernel, and the peers."""
    found = {name: line for name in PEERS if (line := race.get(name))}
    return {OURS: best, **found} if (best := race.best_ours) else found


def _chart(title: str, of: Sequence[Race], high: float) -> Chart:
    series = []
    for name in (OURS, *PEERS):
        lines = [line for race in of if (line := _shown(race).get(name))]
        points = tuple((float(line["sq"]), float(line["tflops"])) for line in lines)
        tips = tuple(f"{line['impl']}, {line['sq']} tokens: {line['tflops']:.0f} TFLOP/s" for line in lines)
        series.append(Series(name, points, tips, dashed=name != OURS))
    lengths = [float(race.first["sq"]) for race in of]
    x = charts.axis("tokens", lengths, log=True, ticks=lengths)
    ticks = [200.0 * n for n in range(int(high / 200) + 1)] if high > 400 else []
    return Chart(title, x, charts.axis("TFLOP/s", [high], log=False, ticks=ticks), tuple(series))


def picture_section(machines: Sequence[Record]) -> str:
    """The picture of each machine that ran the grid, and what it shows."""
    parts: list[str] = []
    for record in machines:
        if speed_plot(record):
            of_grid = [race for race in races(record.rows) if race.first["suite"] == GRID]
            there = [
                f"`{name}` is {word}" for name, word in INSTALLED.items() if any(map(_has(name), of_grid))
            ]
            also = f" {', '.join(there)}." if there else ""
            parts += [
                f"![TFLOP/s of Tilewise, cuDNN and FlashAttention](docs/speed-{slug(record)}.svg)",
                f"{about(record.parts_of((GRID,)))}: causal attention in bf16, 16,384 tokens in all, "
                "hidden size 2048. `tilewise` is our fastest kernel; `torch cudnn` and `torch flash` "
                f"(FlashAttention-2) are backends of PyTorch's `scaled_dot_product_attention`.{also}",
            ]
    return "\n\n".join(parts) or NOTHING


# The tables


def standing_section(machines: Sequence[Record]) -> str:
    """One row for each kind of problem and type, with a column for each pass."""
    parts: list[str] = []
    for record in machines:
        of = races(record.rows)
        rows = [row for kind, suites in KINDS for row in _kind_rows(kind, suites, of)]
        if rows:
            head = "| what | type | forward | backward |\n| --- | --- | --- | --- |"
            suites = [suite for _, of_kind in KINDS for suite in of_kind]
            parts += [f"{about(record.parts_of(suites))}:", "\n".join((head, *rows))]
    return "\n\n".join(parts) or NOTHING


def _kind_rows(kind: str, suites: tuple[str, ...], of: Sequence[Race]) -> Iterable[str]:
    members = [race for race in of if _belongs(race.first, suites)]
    for dtype in dict.fromkeys(race.first["dtype"] for race in members):
        cells = [
            _cell([race for race in members if (race.first["pass"], race.first["dtype"]) == (name, dtype)])
            for name in ("forward", "backward")
        ]
        if any(cells):
            yield f"| {kind} | {dtype} | {' | '.join(cell or '-' for cell in cells)} |"


def _belongs(line: Line, suites: tuple[str, ...]) -> bool:
    """Models have rows of both types: those of f32 count with the other problems in f32."""
    if line["suite"] in MODELS:
        return suites[0] == ("f32" if line["dtype"] == "f32" else GRID)
    return line["suite"] in suites


def _cell(members: Sequence[Race]) -> str:
    stand = summary.standing(members)
    if stand is None:
        return ""
    figures = f"**{stand.median:.2f}** ({stand.low:.2f} to {stand.high:.2f})"
    return f"{figures}, ahead in {stand.faster} of {stand.count}"


def _row(name: str, direction: str, dtype: str, members: Sequence[Race], day: str) -> Iterable[str]:
    if stand := summary.standing(members):
        ahead, over = f"{stand.faster} of {stand.count}", f"{stand.low:.2f} to {stand.high:.2f}"
        yield f"| {name} | {direction} | {dtype} | {stand.median:.2f} | {ahead} | {over} | {day} |"


def suites_section(machines: Sequence[Record]) -> str:
    """Every suite, pass and type of every machine, for docs/benchmarks.md."""
    parts: list[str] = []
    for record in machines:
        of = races(record.rows)
        rows = [
            row
            for (suite, direction, dtype), members in summary.by_suite(of).items()
            for row in _row(suite, direction, type_words(dtype), members, days(record.parts_of((suite,))))
        ]
        if rows:
            parts.append(
                f"{about(record.parts_of({race.first['suite'] for race in of if race.speed_up}))}: "
                "the time of the fastest peer over that of our fastest kernel. "
                "Above 1 Tilewise is faster."
            )
            if speed_plot(record):
                parts.append(f"![TFLOP/s over the length](speed-{slug(record)}.svg)")
            parts.append(
                f"![Speed against the fastest peer on {record.machine}](against-peers-{slug(record)}.svg)"
            )
            parts.append("\n".join((*HEAD, *rows)))
    return "\n\n".join(parts) or NOTHING
