"""`make figures`: the documents' pictures and tables, drawn from the records in results/.

What is between two marker comments of a page is replaced; the same records give the same files. A test fails
where files and records differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tilewise.bench import (
    behind_figures,
    charts,
    deterministic_figures,
    earlier_figures,
    f32_figures,
    grid_figures,
    head_figures,
    layer_figures,
    llama_figures,
    mask_figures,
    model_figures,
    overview_figures,
    plots,
    profile_figures,
    summary,
    text_figures,
)
from tilewise.bench.charts import Axis, Chart, Series
from tilewise.bench.records import Line, Record, read
from tilewise.bench.summary import Race, races

RUNGS = ("naive", "tiled", "fused")
PEER = "torch efficient"
LADDER = (*RUNGS, PEER)
NOTHING = "-"  # in a cell that the record has no figure for


def render(root: Path) -> dict[Path, str]:
    """Every file that is drawn, and its text."""
    docs, h200 = root / "docs", root / "results" / "nvidia-h200"
    records = [read(path) for path in sorted((root / "results").glob("*/*.jsonl"))]
    merged = summary.by_machine(records)
    machines = [record for record in merged if summary.standing(races(record.rows))]
    files = pictures(docs, machines) | model_pages(root)
    sections = [
        (root / "README.md", "picture", overview_figures.picture_section(machines)),
        (root / "README.md", "standing", overview_figures.standing_section(machines)),
        (docs / "benchmarks.md", "suites", overview_figures.suites_section(machines)),
        (docs / "capabilities.md", "earlier", earlier_figures.section(h200)),
        (docs / "lab" / "layer.md", "measured", layer_figures.section(merged)),
        (docs / "lab" / "wide.md", "heads", head_figures.section(h200)),
        (docs / "lab" / "wgmma.md", "grid", grid_figures.section(h200, "wgmma", "torch cudnn")),
        (docs / "lab" / "mma.md", "grid", grid_figures.section(h200, "mma", "torch flash")),
        (docs / "lab" / "mma.md", "behind", behind_figures.section(h200)),
        (docs / "lab" / "mma.md", "masks", mask_figures.section(h200)),
        (docs / "lab" / "mma.md", "deterministic", deterministic_figures.section(h200)),
        (docs / "lab" / "mma.md", "profile", profile_figures.section(h200)),
        (docs / "lab" / "mma_f32.md", "f32", f32_figures.section(h200)),
        (docs / "text_models.md", "text models", text_figures.section(h200)),
    ]
    ladder = h200 / "ladder.jsonl"
    if ladder.exists():
        record = read(ladder)
        sections.append((docs / "lab" / "ladder.md", "ladder", ladder_section(record)))
        files[docs / "ladder.svg"] = charts.standalone(ladder_plot(record))
    for path, name, section in sections:
        files[path] = between(files.get(path) or path.read_text(), name, section)
    return files


def pictures(docs: Path, machines: Sequence[Record]) -> dict[Path, str]:
    """How each machine stands beside its peers: the picture of README, and that of every problem."""
    files = {}
    for record in machines:
        slug = overview_figures.slug(record)
        if speeds := overview_figures.speed_plot(record):
            files[docs / f"speed-{slug}.svg"] = charts.standalone(speeds)
        if strips := plots.against_peers(races(record.rows), legend=True):
            files[docs / f"against-peers-{slug}.svg"] = charts.standalone(strips)
    return files


def model_pages(root: Path) -> dict[Path, str]:
    """docs/lab/models.md, and its plot where there is a record of it."""
    page, files = root / "docs" / "lab" / "models.md", {}
    found = model_figures.read(root / "results" / "nvidia-h200")
    text = page.read_text()
    for name, section, lines in (
        ("vit scaling", model_figures.scaling_section, found["vit-model"]),
        ("vit training", model_figures.training_section, found["vit-train"]),
        ("llama", llama_figures.section, found["llama-model"]),
    ):
        text = between(text, name, section(lines))
    files[page] = text
    if len(found["vit-model"]) > 1:
        plot = model_figures.scaling_plot(found["vit-model"])
        files[root / "docs" / "vit-scaling.svg"] = charts.standalone(plot)
    return files


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between its marker comments of that name."""
    begin, end = f"<!-- {name}: begin, by make figures -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks the comments {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


# The ladder


def scratch_mb(line: Line) -> float:
    """What a call allocates beyond o, or beyond dq, dk and dv."""
    results = (
        4e-6 * line["b"] * line["hq"] * line["sq"] * line["dv"] * (1 if line["pass"] == "forward" else 3)
    )
    scratch = line["peak_mb"] - results
    return scratch if scratch >= 1e-5 * results else 0.0  # the record has six digits


def _figure(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _cell(line: Line | None) -> str:
    if line is None:
        return NOTHING
    scratch = scratch_mb(line)
    return f"{_figure(line['ms'])} · {_figure(line['tflops'])} · {scratch:.{1 if scratch < 100 else 0}f}"


def _times_as_fast(slow: Line | None, fast: Line | None) -> str:
    return f"{slow['ms'] / fast['ms']:.2f}" if slow and fast else NOTHING


def _series(record: Record) -> dict[tuple[str, int], list[Race]]:
    """Races of the ladder by pass and head dim, forward first; full before causal, short before long."""
    of = [race for race in races(record.rows) if any(race.get(impl) for impl in LADDER)]
    of.sort(key=lambda race: [race.first[key] for key in ("causal", "sq")])
    found: dict[tuple[str, int], list[Race]] = {}
    for race in of:
        found.setdefault((race.first["pass"], race.first["d"]), []).append(race)
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "forward", item[0][1])))


def ladder_section(record: Record) -> str:
    environment = record.environment
    rates = [
        f"{_figure(rate)} TFLOP/s by {what}"
        for name, what in (("multiply-adds", "bare multiply-adds"), ("gemm", "PyTorch's f32 matrix product"))
        if (rate := record.rate(name, "f32", "tflops"))
    ]
    first = record.rows[0]
    lines = [
        f"{environment['gpu']}, driver {environment['driver']}, PyTorch {environment['torch']}; "
        f"f32, B {first['b']}, H {first['hq']}.",
        *([f"In the same run the card gave {' and '.join(rates)}."] if rates else []),
    ]
    for (direction, d), members in _series(record).items():
        lines += ["", *_ladder_table(direction, d, members)]
    return "\n".join(lines)


def _ladder_table(direction: str, d: int, members: Sequence[Race]) -> Iterator[str]:
    steps = (("naive", "tiled"), ("tiled", "fused"), (PEER, "fused"))
    gains = [f"{fast} : {slow}" for slow, fast in steps]
    yield f"| {direction} D {d} | S | " + " | ".join((*LADDER, *gains)) + " |"
    yield "| --- | ---: |" + " ---: |" * (len(LADDER) + len(gains))
    for race in members:
        columns = [_cell(race.get(impl)) for impl in LADDER]
        columns += [_times_as_fast(race.get(slow), race.get(fast)) for slow, fast in steps]
        mask = "causal" if race.first["causal"] else "full"
        yield f"| {mask} | {race.first['sq']} | " + " | ".join(columns) + " |"


def ladder_plot(record: Record) -> str:
    """A row a pass: the rate at each head dim, then the scratch memory, without a mask."""
    found = _series(record)
    dims = sorted({d for _, d in found})
    drawn: list[Chart] = []
    for direction in ("forward", "backward"):
        of = {d: [race for race in found.get((direction, d), ()) if not race.first["causal"]] for d in dims}
        drawn += [_ladder_chart(f"{direction}, D {d}", "TFLOP/s", of[d], record) for d in dims]
        drawn.append(_ladder_chart(f"{direction}, D {dims[0]}", "MB beyond the results", of[dims[0]], record))
    return charts.grid(drawn, len(dims) + 1, LADDER)


def _ladder_chart(title: str, unit: str, members: Sequence[Race], record: Record) -> Chart:
    series = []
    for impl in LADDER:
        lines = [line for race in members if (line := race.get(impl))]
        values = [line["tflops"] if unit == "TFLOP/s" else scratch_mb(line) for line in lines]
        points = [(float(line["sq"]), y) for line, y in zip(lines, values, strict=True) if y > 0]
        if points:
            series.append(Series(impl, tuple(points), dashed=impl == PEER))
    lengths = [float(race.first["sq"]) for race in members]
    x = charts.axis("sequence length", lengths, log=True, ticks=lengths)
    if unit != "TFLOP/s":
        return Chart(
            title, x, charts.axis(unit, [y for one in series for _, y in one.points], True), tuple(series)
        )
    y = Axis(unit, 0.3, 100.0, True, (0.3, 1.0, 3.0, 10.0, 30.0, 100.0))
    rules = []
    if rate := record.rate("multiply-adds", "f32", "tflops"):
        rules.append(("bare multiply-adds", ((x.low, rate), (x.high, rate))))
    return Chart(title, x, y, tuple(series), tuple(rules))


def main(root: Path) -> int:
    for path, text in render(root).items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"drawn     {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
