"""Reports of hand-made records: figures, pictures, and a page that a browser opens without complaint."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from bench_rows import RATES, row, rows, write
from tilewise import cli
from tilewise.bench import (
    behind_figures,
    charts,
    deterministic_figures,
    earlier_figures,
    f32_figures,
    figures,
    grid_figures,
    mask_figures,
    measure,
    overview_figures,
    plots,
    profile_figures,
    records,
    report,
    roofline,
    summary,
)
from tilewise.bench.problem import BadInput, Problem
from tilewise.bench.timing import Timing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def record(tmp_path: Path) -> records.Record:
    return records.read(write(tmp_path / "ladder.jsonl"))


# Arithmetic


def test_derived_figures_follow_from_the_time() -> None:
    problem = Problem(hq=2, hkv=2, sq=1000, sk=1000, d=100, dv=100)
    found = measure.derived(problem, Timing(ms=2.0, spread=0.1, runs=20), compute=0.8, copy=10.0)
    assert problem.flops == 8e8 and found["tflops"] == 0.4 and found["percent_of_peak"] == 50.0
    size = 4 * 4 * 2 * 1000 * 100 + 4 * 2 * 1000
    assert found["gbps"] == pytest.approx(size / 2.0 * 1e-6) and found["percent_of_copy"] == pytest.approx(
        10 * found["gbps"]
    )
    assert measure.derived(problem, Timing(2.0, 0.1, 20), None, None)["percent_of_peak"] is None


def test_races_compare_the_best_of_both(record: records.Record) -> None:
    of = summary.races(record.rows)
    assert len(of) == 8 and [race.speed_up for race in of] == pytest.approx([1, 1.5, 1.8, 2] * 2)
    assert of[0].best_ours is not None and of[0].best_ours["impl"] == "fused"
    stand = summary.standing(of)
    assert stand and (stand.count, stand.faster, stand.low, stand.high) == (8, 6, 1, 2)
    assert stand.median == pytest.approx(1.65)


def test_conclusion_is_a_few_sentences_from_the_numbers(record: records.Record) -> None:
    where, speed, behind, use, exactness = summary.conclusion(record)
    assert where == "On Example GPU, times as fast as the fastest peer of each problem, in the median:"
    assert speed == "Attention: f32 forward 1.65 (ahead in 3 of 4); f32 backward 1.65 (ahead in 3 of 4)."
    assert behind == "It is behind the fastest peer in none of 8 problems."
    assert "(fused: batch 1, 8 heads, 128 tokens, head dim 64; f32 forward)" in use and "TFLOP/s" in use
    assert "0.50 times that of PyTorch's math path" in exactness
    assert summary.busy(record) is None
    for line in record.rows:
        line["spread"] = 0.5
    assert "50 % or more" in str(summary.busy(record))


def test_conclusion_of_one_kind_of_problem_is_one_sentence_on_speed(record: records.Record) -> None:
    record.rows = [line for line in record.rows if line["pass"] == "forward"]
    assert summary.conclusion(record)[0] == (
        "On Example GPU, Tilewise is 1.65 times as fast as the fastest peer in the median of 4 problems "
        "(1.00 to 2.00) and ahead in 3 of them."
    )


def test_conclusion_without_peers_or_figures() -> None:
    alone = records.Record(rows=[row("fused", 1.0)])
    assert "measured on 1 problem and compared with nothing else" in summary.conclusion(alone)[0]
    nothing = records.Record(rows=[row("fused", None)])
    assert (
        len(summary.conclusion(nothing)) == 3 and "None of its kernels ran" in summary.conclusion(nothing)[1]
    )


def test_where_we_are_behind_is_a_sentence() -> None:
    lines = [
        row("mma", 2.0, suite="masks", dtype="bf16"),
        row("torch cudnn", 1.0, suite="masks", dtype="bf16"),
    ]
    lines += [row("mma", 1.0, sq=sq) for sq in (1, 2, 3)]
    lines += [row("torch math", ms, sq=sq) for sq, ms in ((1, 0.9), (2, 2.0), (3, 3.0))]
    assert summary.behind(summary.races(lines)) == [
        "It is behind the fastest peer in 2 of 4 problems. In the median of a suite it is behind in masks "
        "bf16 forward (0.50). It is furthest behind at batch 1, 8 heads, 1024 tokens, head dim 64; bf16 "
        "forward: 0.50 times as fast as torch cudnn."
    ]
    assert summary.behind(summary.races([row("mma", 1.0)])) == []


def test_tf32_stands_apart_from_f32(tmp_path: Path) -> None:
    """A record from before lines said so has it in the name of the suite."""
    lines = [row("mma", 4.0, error=1e-6), row("torch math", 8.0, error=1e-6)]
    allowed = [row("mma", 1.0, suite="tf32", error=1e-3), row("torch math", 8.0, suite="tf32", error=1e-6)]
    own = [line | {"suite": "mine", "tf32": True} for line in allowed]
    record = records.read(write(tmp_path / "f32.jsonl", lines + allowed + own))
    (merged,) = summary.by_machine([record])
    of = summary.races(merged.rows)
    assert [key[2] for key in summary.by_suite(of)] == ["tf32", "f32", "tf32"]
    assert [key[1:] for key in summary.by_kind(of)] == [("f32", "forward"), ("tf32", "forward")]
    assert "is 1.0 times that of PyTorch's math path in the median of 1 problem," in summary.exactness(of)
    chart = plots.exactness(of)
    assert chart and [len(series.points) for series in chart.series] == [1]
    titles = [chart.title.partition(":")[0] for chart in plots.roofline(merged, of)]
    assert titles == ["f32", "TF32"]
    text = report.page([record])
    assert "<b>1.0e-06</b>" in text and "1.0e-03</b>" not in text and "TF32 forward, ahead in 2 of 2" in text


def test_split_products_have_a_roof_of_their_own() -> None:
    rates = [*RATES, {"op": "rate", "impl": "gemm", "dtype": "f16", "tflops": 750.0}]
    record = records.Record(rates=rates)
    expected = {"fused": 40.0, "torch math": 40.0, "mma": 250.0, "wgmma": 250.0, "torch efficient": 125.0}
    found = {impl: record.yardstick(row(impl, 1.0)) for impl in expected}
    assert {impl: one.tflops for impl, one in found.items() if one} == expected
    allowed = {impl: record.yardstick(row(impl, 1.0, tf32=True)) for impl in expected}
    assert [x.tflops for x in allowed.values() if x] == [40.0, 40.0, 750.0, 750.0, 375.0]
    assert (half := record.yardstick(row("mma", 1.0, dtype="bf16"))) and half.tflops == 800.0
    # Without f16's rate that of bf16 serves; a record with neither has no such roof.
    assert (other := records.Record(rates=RATES).yardstick(row("mma", 1.0))) and other.tflops == 800.0 / 3
    assert records.Record(rates=RATES[:1]).yardstick(row("mma", 1.0)) is None
    record.rows = [row("mma", 4 * 8 * 1024**2 * 64 / 200e9), row("fused", 4 * 8 * 1024**2 * 64 / 30e9)]
    (merged,) = summary.by_machine([record])
    assert [round(line["percent_of_peak"]) for line in merged.rows] == [80, 75]
    (chart,) = plots.roofline(merged, summary.races(merged.rows))
    labels = [label for label, _ in chart.rules]
    assert labels == ["multiply-adds 40.0 TFLOP/s", "split products 250 TFLOP/s"]


def test_rows_above_a_measured_rate_are_so_many_times_as_fast(tmp_path: Path) -> None:
    """The product and the copy that rows are compared with are no limits; no row is above a ceiling."""
    flops = 4 * 8 * 1024**2 * 64
    fast = row("wgmma", flops / 880e9, dtype="bf16")  # PyTorch's product has 800
    slow = row("fused", flops / 600e9, dtype="bf16", sq=2048, sk=2048)
    reads = row("mma", 1.0, dtype="bf16", sq=512, sk=512, percent_of_copy=110.0)
    for line in (slow, reads):
        line["tflops"] = 600.0
    reads["gbps"] = 4400.0
    record = records.read(write(tmp_path / "record.jsonl", [fast, slow, reads]))
    (merged,) = summary.by_machine([record])
    said = summary.use(summary.races(merged.rows))
    assert ", 1.10 times PyTorch's matrix product in bf16" in said
    assert "it moves 4400 GB/s, 1.10 times a copy's rate" in said
    below = summary.use(summary.races([line for line in merged.rows if line["impl"] == "fused"]))
    assert ", 75 % of PyTorch's matrix product in bf16" in below
    text = report.page([record])
    card = '<b>1.10×</b><span class="soft">PyTorch&#x27;s matrix product in bf16, at best</span>'
    assert card in text and "ceiling" not in text and "no limits of the hardware" in text
    assert 'title="of PyTorch&#x27;s matrix product in bf16, 800 TFLOP/s">110</td>' in text


def test_every_yardstick_says_what_it_is() -> None:
    rates = [*RATES, {"op": "rate", "impl": "gemm", "dtype": "f16", "tflops": 750.0}]
    record = records.Record(rates=rates)

    def words(impl: str, **more: Any) -> str:
        found = record.yardstick(row(impl, 1.0, **more))
        assert found
        return found.what

    assert words("fused") == "bare multiply-adds"
    assert words("wgmma") == "a third of PyTorch's matrix product in f16 (split numbers)"
    assert words("torch efficient") == "a sixth of PyTorch's matrix product in f16 (split numbers)"
    assert words("wgmma", tf32=True) == "PyTorch's matrix product in f16"
    assert words("torch efficient", tf32=True) == "half of PyTorch's matrix product in f16"
    assert words("wgmma", dtype="bf16") == "PyTorch's matrix product in bf16"
    record.rates = RATES  # without f16's rate that of bf16 serves, and says so
    assert words("wgmma") == "a third of PyTorch's matrix product in bf16 (split numbers)"


def test_a_rate_of_another_run_serves_where_there_is_none(tmp_path: Path) -> None:
    """The ladder's own run has no rate in f16, from which that of split products follows."""
    first = records.Record(environment={"gpu": "x"}, rates=RATES[:1], rows=[row("mma", 1.0)])
    second = records.Record(environment={"gpu": "x"}, rates=RATES, rows=[row("mma", 1.0, suite="other")])
    (merged,) = summary.by_machine([first, second])
    assert [line["peak_tflops"] for line in merged.rows] == [pytest.approx(800.0 / 3)] * 2


def test_suites_are_shown_in_their_order(tmp_path: Path) -> None:
    names = ("decode", "mine", "llama", "flash-attention-grid")
    for name in names:
        of = [{"suite": name, "sq": sq, "sk": sq} for sq in (128, 256, 512)]
        write(tmp_path / f"{name}.jsonl", [row("fused", 1.0, **x) for x in of])
    text = report.page(records.read_all([tmp_path]))
    options = [part.partition("<")[0] for part in text.split("<option")[1:]]
    assert [x.partition(">")[2] for x in options] == ["flash-attention-grid", "llama", "decode", "mine"]
    assert "The grid of FlashAttention&#x27;s papers" in options[0]


def test_roof_is_the_lower_of_both_rates() -> None:
    record = records.Record(rates=RATES, rows=rows())
    line = row("fused", 1.0)
    assert plots.intensity(line) == pytest.approx(1e3 * line["tflops"] / line["gbps"])
    assert plots.roof_of(record, line) == (40.0, "arithmetic")
    decode = {**line, "tflops": 0.001, "gbps": 1.0}
    assert plots.roof_of(record, decode) == (pytest.approx(4.0), "memory")
    assert "arithmetic" in roofline.text([record])


def test_rates_are_the_highest_and_f32_knows_multiply_adds() -> None:
    more = [{"op": "rate", "impl": "multiply-adds", "dtype": "f32", "tflops": 60.0}]
    record = records.Record(rates=RATES + more)
    assert record.compute_rate("f32") == 60.0 and record.compute_rate("bf16") == 800.0
    assert record.compute_rate("f16") is None and record.copy_rate == 4000.0


# Records


def test_the_cpp_benchmarks_records_are_read(tmp_path: Path) -> None:
    environment = {"device": "cpu", "cpu": "Example", "threads": 2, "peak_gflops": {"1": 100.0, "2": 200.0},
                   "copy_gbps": {"1": 10.0, "2": 20.0}}  # fmt: skip
    lines = [row("simd", 1.0, device="cpu", threads=n, level="avx2") for n in (1, 2)]
    path = tmp_path / "cpu.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in [{"environment": environment}, *lines]))
    record = records.read(path)
    assert len(record.rows) == 2 and record.compute_rate("f32") == 0.2 and record.copy_rate == 20.0
    assert "2 thr." in report.page([record])
    # Each row brings the rate of multiply-adds at its own time, which counts.
    for line, rate in zip(record.rows, (150.0, 300.0), strict=True):
        line["peak_gflops"] = rate
    (merged,) = summary.by_machine([record])
    assert [line["peak_tflops"] for line in merged.rows] == pytest.approx([0.15, 0.3])
    assert {line["yardstick"] for line in merged.rows} == {"bare multiply-adds"}
    assert record.compute_rate("f32") == pytest.approx(0.3)


def test_records_of_one_machine_are_one(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", [row("fused", 1.0, suite="other")])
    (tmp_path / "tests.jsonl").write_text('{"environment": {}}\n{"suite": "core_test", "passed": 3}\n')
    (merged,) = summary.by_machine(records.read_all([tmp_path]))
    assert len(merged.rows) == len(rows()) + 1


def test_a_suite_of_an_older_record_has_its_present_name(tmp_path: Path) -> None:
    record = records.read(write(tmp_path / "fa3-grid.jsonl", [row("mma", 1.0, suite="fa3-grid")]))
    assert [line["suite"] for line in record.rows] == ["flash-attention-grid"]


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense\n{}\n")
    with pytest.raises(ValueError, match="line 1: expected JSON, got 'nonsense'"):
        records.read(path)
    for line, wrong in (
        ('{"environment": 3}', "environment: expected an object, got 3"),
        ('{"op": "rate"}', "impl: expected text, got none"),
        ('{"pass": "forward", "impl": "simd"}', "suite: expected text, got none"),
    ):
        path.write_text(f"{line}\n")
        with pytest.raises(BadInput, match=rf"bad\.jsonl, line 1: {wrong}"):
            records.read(path)


# Pictures


def test_pictures_are_xml_with_every_series(record: records.Record) -> None:
    files = plots.all_files(record)
    kinds = {name.split("-")[0] for name in files}
    assert kinds >= {"throughput", "latency", "speed", "memory", "error", "roofline", "against", "ladder"}
    assert any(name.endswith("without-naive") for name in files)
    for name, svg in files.items():
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg") and "nan" not in svg.lower().replace("tenant", ""), name
    with_naive = files["latency-ladder-forward-f32-8-heads-64"]
    assert "var(--s-naive)" in with_naive and "var(--s-torch-efficient)" in with_naive


@pytest.mark.parametrize("values", [[1.0], [0.3, 0.4], [1e-7, 1e-3], [5.0, 5.0], [0.001, 90000.0]])
def test_axes_have_ticks_inside(values: list[float]) -> None:
    for log in (True, False):
        axis = charts.axis("x", values, log)
        assert 2 <= len(axis.ticks) <= 8 and all(0 <= axis.place(tick) <= 1 for tick in axis.ticks)
        assert all(0 <= axis.place(value) <= 1 for value in values)


# The page


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]


def test_page_needs_nothing_from_elsewhere(record: records.Record) -> None:
    text = report.page([record])
    page = Page()
    page.feed(text)
    assert all(link.startswith("data:") for link in page.links) and "@import" not in text
    assert page.tags.count("tr") == 1 + len(rows()) and page.tags.count("svg") > 20
    assert "How to reproduce it" in text and "<code>tilewise bench --suite ladder</code>" in text
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    assert "&lt;this&gt; &amp; that" in text  # reasons are escaped


def test_report_command_writes_page_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "ladder.jsonl")
    assert cli.main(["report", str(path), "--plots", str(tmp_path / "plots")]) == 0
    assert "f32 forward 1.65 (ahead in 3 of 4)" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists() and len(list(tmp_path.glob("plots/*/*.svg"))) > 10


def test_a_page_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "ladder.jsonl")
    page = ["--out", str(tmp_path / "page.html")]
    for arguments, message in (
        (["--out", str(tmp_path)], f"--out: cannot write {tmp_path}: it is a folder"),
        (["--out", str(path / "page.html")], f"{path} is not a folder"),
        (["--out", "/proc/page.html"], "--out: cannot write /proc/page.html: "),
        ([*page, "--plots", str(path)], f"--plots: cannot write {path}"),
    ):
        assert cli.main(["report", str(path), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_png_needs_matplotlib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "ladder.jsonl")
    arguments = ["report", str(path), "--plots", str(tmp_path / "plots"), "--png"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert cli.main(arguments) == 2 and "--png: expected matplotlib" in capsys.readouterr().err
    else:
        assert cli.main(arguments) == 0 and len(list(tmp_path.glob("plots/*/*.png"))) > 5


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
# Clicks what a reader would, and writes what came of it where --dump-dom shows it.
PROBE = """<script>
const seen = selector => [...document.querySelectorAll(selector)].filter(x => !x.hidden && x.offsetParent);
const out = {panels: seen('.panel [data-metric=throughput]').length};
document.querySelector('[data-metric-choice=latency]').click();
out.latency = seen('.panel [data-metric=latency]').length;
out.throughput = seen('.panel [data-metric=throughput]').length;
document.querySelector('[data-growth] input').click();
out.slow = seen('.panel [data-slow=no]').length;
const header = [...document.querySelectorAll('[data-rows] thead th')].find(x => x.textContent === 'ms');
const column = header.cellIndex, cells = () =>
  [...document.querySelectorAll('[data-rows] tbody tr')].map(r => r.cells[column].dataset.v).map(parseFloat);
header.querySelector('button').click(); out.up = cells();
header.querySelector('button').click(); out.down = cells();
const search = document.querySelector('input[type=search]');
search.value = 'fused backward'; search.dispatchEvent(new Event('input'));
out.found = seen('[data-rows] tbody tr').length;
out.wide = document.documentElement.scrollWidth <= window.innerWidth;
search.value = ''; search.dispatchEvent(new Event('input'));
const shown = [...document.querySelectorAll('td, th, .card, svg, p')].filter(x => x.checkVisibility());
out.inside = Math.max(...shown.map(x => x.getBoundingClientRect().right)) <= window.innerWidth;
out.legend = seen('[data-growth] .legend span').map(x => x.textContent);
const made = []; URL.createObjectURL = blob => { made.push(blob); return 'data:,'; };
for (const button of document.querySelectorAll('[data-download] button')) button.click();
out.kinds = made.length;
const data = JSON.parse(document.querySelector('[data-download] script').textContent);
out.data = [data.columns.length, data.rows.length];
parent.postMessage(JSON.stringify(out), '*');
</script>"""
# A window is never as narrow as a phone, a frame may be.
FRAME = """<!doctype html><body><script>
addEventListener('message', event => { document.body.innerHTML = `<pre id="probe">${event.data}</pre>`; });
</script><iframe src="probed.html" style="width:WIDTHpx;height:2000px;border:0"></iframe></body>"""


def browse(profile: Path, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    fixed += [f"--user-data-dir={profile}", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [str(CHROMIUM), *fixed, *options, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH to open the report with")
@pytest.mark.parametrize("width", [390, 1280])
def test_page_works_in_a_browser(record: records.Record, tmp_path: Path, width: int) -> None:
    """Beside an earlier run, so that all columns are there: none may be out of sight."""
    page, probed, framed = (tmp_path / name for name in ("report.html", "probed.html", "framed.html"))
    page.write_text(report.page([record], [record]))
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    framed.write_text(FRAME.replace("WIDTH", str(width)))
    shot = tmp_path / "page.png"
    browse(tmp_path / "profile", page, f"--window-size={width},2000", f"--screenshot={shot}")
    assert shot.read_bytes()[:4] == b"\x89PNG" and shot.stat().st_size > 40_000  # far from blank

    done = browse(tmp_path / "profile", framed, "--window-size=1400,2100", "--dump-dom")
    found = json.loads(done.stdout.partition('<pre id="probe">')[2].partition("</pre>")[0])
    assert found["panels"] == found["latency"] == 2 and found["throughput"] == 0 and found["slow"] == 2
    timed = [x for x in found["up"] if x is not None]
    assert timed == sorted(timed) and found["up"][-8:] == [None] * 8
    assert [x for x in found["down"] if x is not None] == timed[::-1] and found["down"][-8:] == [None] * 8
    assert found["found"] == 4 and found["wide"] and found["inside"]
    assert set(found["legend"]) == {"naive", "fused", "torch math", "torch efficient"}
    assert found["kinds"] == 2 and found["data"][1] == len(rows())


# Documents


def test_overview_compares_with_the_fastest_peer_and_draws_the_grid(tmp_path: Path) -> None:
    lines = []
    for sq in (512, 1024):
        size = {"suite": "flash-attention-grid", "dtype": "bf16", "causal": True, "sq": sq, "sk": sq}
        lines += [row("wgmma", 1.0, **size), row("mma", 2.0, **size)]
        lines += [row("torch cudnn", 1.5, **size), row("torch flash", 3.0, **size)]
    lines += [row("wgmma", 1.0, suite="vit"), row("torch efficient", 4.0, suite="vit")]  # f32
    record = records.read(write(tmp_path / "flash-attention-grid.jsonl", lines))
    text = overview_figures.standing_section([record])
    assert "models, FlashAttention's grid | bf16 | **1.50** (1.50 to 1.50), ahead in 2 of 2 | - |" in text
    assert "| attention in f32 | f32 | **4.00** (4.00 to 4.00), ahead in 1 of 1 | - |" in text
    table = overview_figures.suites_section([record])
    assert "| flash-attention-grid | forward | bf16 | 1.50 | 2 of 2 | 1.50 to 1.50 |" in table
    assert "docs/speed-example-gpu.svg" in overview_figures.picture_section([record])
    svg = overview_figures.speed_plot(record)
    assert svg is not None and "forward, head dim 64" in svg
    ElementTree.fromstring(svg)
    alone = records.read(write(tmp_path / "alone.jsonl", [row("fused", 1.0)]))
    assert overview_figures.speed_plot(alone) is None
    assert overview_figures.picture_section([alone]) == overview_figures.NOTHING
    assert overview_figures.suites_section([alone]) == overview_figures.NOTHING


def test_tables_of_several_records_say_the_days_of_those_they_show(tmp_path: Path) -> None:
    days = {"vit": "2020-01-02", "decode": "2020-02-03", "flash-attention-grid": "2020-03-04"}
    found = []
    for suite, day in days.items():
        lines = [
            row(impl, ms, suite=suite, dtype="bf16", causal=True)
            for impl, ms in (("mma", 1.0), ("torch flash", 2.0))
        ]
        path = write(tmp_path / f"{suite}.jsonl", lines)
        path.write_text(path.read_text().replace("2020-01-02", day))
        found.append(records.read(path))
    (merged,) = summary.by_machine(found)
    everything = "Example GPU, PyTorch 2.10, 2020-01-02 to 2020-03-04:"
    assert overview_figures.standing_section([merged]).startswith(everything)
    assert (
        overview_figures.picture_section([merged])
        .splitlines()[2]
        .startswith("Example GPU, PyTorch 2.10, 2020-03-04:")
    )
    table = overview_figures.suites_section([merged])
    assert table.startswith(everything)
    for suite, day in days.items():
        assert f"| {suite} | forward | bf16 | 2.00 | 1 of 1 | 2.00 to 2.00 | {day} |" in table
    assert "2020-01-02 to 2020-03-04</p>" in report.page(found)

    (first,) = summary.by_machine(found[:1])
    assert overview_figures.standing_section([first]).startswith("Example GPU, PyTorch 2.10, 2020-01-02:")


def test_the_picture_of_the_peers_names_the_kernels_of_its_marks(record: records.Record) -> None:
    of = summary.races(record.rows)
    bare, named = plots.against_peers(of), plots.against_peers(of, legend=True)
    assert bare and named and "fused</text>" not in bare and "fused</text>" in named
    heights = [float(ElementTree.fromstring(svg).attrib["viewBox"].split()[3]) for svg in (bare, named)]
    assert heights[1] == heights[0] + 24  # a line of its own


def test_deterministic_times_stand_beside_the_default(tmp_path: Path) -> None:
    asked = {"features": deterministic_figures.WORD}
    lines = [
        *(row("mma", 2.0), row("torch flash", 4.0)),
        *(row("mma", 2.5, **asked), row("torch flash", None, **asked)),
        row("mma", 1.0, sq=7),  # without the other
    ]
    write(tmp_path / "deterministic.jsonl", lines)
    text = deterministic_figures.section(tmp_path)
    assert text.startswith("Example GPU, PyTorch 2.10, 2020-01-02: ")
    assert text.endswith("\n| h8 s1024 d64 | 2.000 | 2.500 | 1.25 | 4.000 | - | - |")
    write(tmp_path / "deterministic.jsonl", [])
    assert deterministic_figures.section(tmp_path) == deterministic_figures.NOTHING
    assert deterministic_figures.section(tmp_path / "nowhere") == deterministic_figures.NOTHING


def test_counters_are_shown_beside_the_peers(tmp_path: Path) -> None:
    counters = {
        "tensor pipe": 71.6,
        "instructions": 400.0,
        "tensor instructions": 100.0,
        "registers a thread": 255.0,
    }
    line = {"suite": "mma-profile", "op": "profile", "b": 4, "hq": 16, "sq": 4096, "d": 128, "kernel": "k"}
    lines = [
        {"environment": {"gpu": "A GPU", "torch": "2.11", "date": "2026-01-02T03:04:05+00:00"}},
        *(
            {**line, "direction": "forward", "dtype": "bf16", "impl": impl, "figures": counters}
            for impl in ("mma", "torch flash")
        ),
        {**line, "direction": "backward", "dtype": "f32", "impl": "mma", "figures": {"tensor pipe": 50.0}},
    ]
    (tmp_path / "mma-profile.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = profile_figures.section(tmp_path)
    assert "| tensor pipe, % | 72 (72) |" in text and "| tensor pipe, % | 50 |" in text
    assert "| instructions for one of the tensor pipe's | 4.0 (4.0) |" in text
    assert "| bf16, forward | b4 h16 s4096 d128 |" in text and "| occupancy, % | - |" in text
    assert profile_figures.section(tmp_path / "nowhere") == profile_figures.NOTHING


def test_the_grid_ends_with_the_geometric_mean_of_each_pass(tmp_path: Path) -> None:
    lines = []
    for direction in ("forward", "backward"):
        for sq, gain in ((512, 1.0), (1024, 4.0 if direction == "forward" else 1.0)):
            of = {"pass": direction, "dtype": "bf16", "sq": sq, "sk": sq}
            lines += [row("mma", 1.0, **of), row("torch flash", gain, **of)]
    write(tmp_path / "flash-attention-grid.jsonl", lines)
    text = grid_figures.section(tmp_path, "mma", "torch flash")
    assert "forward 2.000 over 2 shapes, 1.00 to 4.00; backward 1.000 over 2 shapes, 1.00 to 1.00." in text


def test_the_section_of_problems_behind_has_those_alone(tmp_path: Path) -> None:
    assert behind_figures.section(tmp_path) == behind_figures.NOTHING
    ahead, behind = {"sq": 512, "dtype": "bf16"}, {"sq": 64, "dtype": "bf16"}
    lines = [row("mma", 1.0, **ahead), row("torch flash", 1.5, **ahead), row("mma", 1.0, sq=7)]
    write(tmp_path / "llama.jsonl", lines)
    assert (
        behind_figures.section(tmp_path)
        == "Of 1 problems that both ran (2020-01-02) `mma` takes more than 1 % longer in 0."
    )
    write(tmp_path / "llama.jsonl", [*lines, row("mma", 3.0, **behind), row("torch flash", 2.0, **behind)])
    text = behind_figures.section(tmp_path)
    assert text.startswith(
        "Of 2 problems that both ran (2020-01-02) `mma` takes more than 1 % longer in 1; ms."
    )
    assert text.splitlines()[4:] == ["| llama | h8 sq64 sk1024 d64 | forward | bf16 | 3.000 | 2.000 | 1.50 |"]


def test_masks_are_shown_by_pass(tmp_path: Path) -> None:
    assert mask_figures.section(tmp_path) == mask_figures.NOTHING
    masked = {"features": "mask=additive", "dtype": "bf16"}
    lines = [row("mma", 0.5, **masked), row("wgmma", None, **masked), row("torch cudnn", 0.25, **masked)]
    write(tmp_path / "masks.jsonl", [*lines, row("mma", 2.0, **masked, **{"pass": "backward"})])
    forward, backward = mask_figures.section(tmp_path).split("\n\n")[1:]
    assert forward.splitlines()[0] == "| forward | mma | torch cudnn |"
    assert forward.splitlines()[2] == "| h8 s1024 d64 mask=additive, bf16 | 500 | 250 |"
    assert backward.splitlines()[2] == "| h8 s1024 d64 mask=additive, bf16 | 2000 |"


def test_f32_is_shown_with_tf32_and_both_passes_together(tmp_path: Path) -> None:
    assert f32_figures.section(tmp_path) == f32_figures.NOTHING
    back = {"pass": "backward"}
    lines = [row("wgmma", 1.0), row("mma", 2.0), row("torch efficient", 4.0)]
    lines += [row("mma", 3.0, **back), row("torch efficient", 6.0, **back), row("mma", 5.0, sq=7)]
    lines += [row("fused", 8.0, sq=7, **back), row("torch efficient", 4.0, sq=7, **back)]
    write(tmp_path / "f32.jsonl", lines)
    write(
        tmp_path / "tf32.jsonl", [row("wgmma", 0.5, suite="tf32"), row("torch efficient", 4.0, suite="tf32")]
    )
    rows = f32_figures.section(tmp_path).splitlines()[4:]
    cells = "1.000 | 2.000 | 4.000 | 0.500 | - | 3.000 | - | 6.000 | 4.00 | 8.00 | 2.00 | 2.50"
    assert rows[0] == f"| h8 s1024 d64 | {cells} |"
    assert rows[1] == "| h8 sq7 sk1024 d64 | - | 5.000 | - | - | - | - | 8.000 | 4.000 | - | - | 0.50 | - |"


def test_earlier_figures_stand_beside_what_is_recorded_alone(tmp_path: Path) -> None:
    assert earlier_figures.section(tmp_path) == earlier_figures.NOTHING
    one = {"hq": 1, "hkv": 1, "relative_error": 2e-7}
    lines = [row("naive", 60.0, **one), row("wide", 2.0, **one), row("torch math", 4.0, **one)]
    lines += [row("wide", 4.0, **{**one, "causal": True, "relative_error": 3e-7})]
    lines += [
        row("wgmma", 1.0, sq=4096),
        row("torch math", 9.0, sq=4096),
        row("torch efficient", 5.0, sq=4096),
    ]
    write(tmp_path / "common-shapes.jsonl", lines)
    assert earlier_figures.section(tmp_path).splitlines()[4:] == [
        "| 4096 tokens, times as fast as PyTorch's math path | 6.6 | 9.00 | 8 heads, head dims 64 |",
        "| one wide head on tensor cores, times as fast as `naive` | 51 | 30 | 1024 tokens, head dims 64 |",
        "| the relative error of that kernel | 1.3e-06 | 2.0e-07 | the same |",
        "| the relative error of causal, window and block mask | 1 to 5 | 3.0e-07 | one head, 1024 tokens, "
        "head dim 64 |",
        "| these three, times as fast as the dense call |  | 0.50 | the same |",
    ]


@pytest.mark.parametrize("suite", ["f32", "ladder", "common-shapes"])
def test_recorded_f32_has_the_error_of_f32(suite: str) -> None:
    """At most twice that of PyTorch's math path, and 2e-6 of the results at 1024 tokens of 128 dims."""
    if not (ROOT / "README.md").exists():
        pytest.skip("a staged tree has no records")
    path = ROOT / f"results/nvidia-h200/{suite}.jsonl"
    checked = 0
    for race in summary.races(records.read(path).rows):
        math = race.get("torch math")
        for line in race.timed(of_ours=True):
            if line["dtype"] != "f32" or line.get("relative_error") is None:
                continue
            if (line["sq"], line["sk"], line["d"]) == (1024, 1024, 128):
                assert line["relative_error"] <= 2e-6, line
            if math and math.get("relative_error") is not None:
                assert line["relative_error"] <= 2 * math["relative_error"], line
                assert line["error"] <= 2 * math["error"], line
            checked += 1
    assert checked > 20


def test_a_page_without_its_comments_is_said() -> None:
    page = "before\n<!-- x: begin, by make figures -->\nold\n<!-- x: end -->\nafter\n"
    drawn = figures.between(page, "x", "new")
    assert "\nnew\n" in drawn and "old" not in drawn
    assert drawn.startswith("before\n") and drawn.endswith("\nafter\n")
    assert figures.between(drawn, "x", "new") == drawn
    for lacking in ("", page.replace("<!-- x: end -->", "")):
        with pytest.raises(ValueError, match="the page lacks the comments"):
            figures.between(lacking, "x", "new")


def test_drawing_writes_what_differs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {tmp_path / name: name for name in ("same", "other", "fresh")}
    (tmp_path / "same").write_text("same")
    (tmp_path / "other").write_text("old")
    monkeypatch.setattr(figures, "render", lambda root: pages)
    before = (tmp_path / "same").stat().st_mtime_ns
    assert figures.main(tmp_path) == 0
    assert all(path.read_text() == text for path, text in pages.items())
    assert (tmp_path / "same").stat().st_mtime_ns == before
    assert capsys.readouterr().out.split() == ["drawn", "other", "drawn", "fresh"]


def test_documents_are_drawn_from_the_records() -> None:
    if not (ROOT / "results").exists() or not (ROOT / "README.md").exists():
        pytest.skip("a staged tree has no documents")
    for path, text in figures.render(ROOT).items():
        assert path.exists() and path.read_text() == text, f"{path.relative_to(ROOT)}: run make figures"
