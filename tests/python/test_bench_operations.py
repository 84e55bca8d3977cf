"""The operations around attention in the benchmark: rows, work, exactness, passes, records and reports."""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tilewise import cli
from tilewise.bench import kinds, layer_figures, measure, plots, report, suites, summary
from tilewise.bench import run as running
from tilewise.bench.implementations import CannotTake
from tilewise.bench.operations import OPERATIONS, calls, hugging_face, masked
from tilewise.bench.operations.decode_step import DecodeStep
from tilewise.bench.operations.ffn import Ffn
from tilewise.bench.operations.gemm import Gemm
from tilewise.bench.operations.layer import MODELS, Layer
from tilewise.bench.operations.masked import MaskedAttention
from tilewise.bench.operations.norm import Norm
from tilewise.bench.operations.rope import Rope
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Record, read
from torch.nn.attention.flex_attention import flex_attention

CPU = torch.device("cpu")
SMALL = replace(MODELS["llama-small"], embed_dim=48, num_heads=4, num_kv_heads=2, head_dim=12, ffn_dim=64)
PROBLEMS = [
    Gemm(m=5, n=24, k=16),
    Gemm(m=64, n=32, k=48, dtype="bf16", direction="both"),
    Ffn(kind="gelu", tokens=7, embed=16, hidden=40, direction="backward"),
    Ffn(kind="swiglu", tokens=7, embed=16, hidden=40, dtype="f16"),
    Norm(kind="rms", rows=6, dim=32, direction="backward"),
    Norm(kind="layer", rows=6, dim=32, dtype="bf16"),
    Norm(kind="residual", rows=6, dim=32),
    Rope(heads=2, length=9, dim=8),
    Layer(model="llama-small", batch=2, tokens=9, direction="both"),
    Layer(model="bert-base", tokens=5),
    DecodeStep(model="llama-small", batch=2, context=12),
    MaskedAttention(kind="sinks", heads=2, length=40, dim=8, direction="both"),
    MaskedAttention(kind="softcap", heads=2, length=40, dim=8),
    MaskedAttention(kind="alibi", heads=2, length=40, dim=8, direction="backward"),
    MaskedAttention(kind="documents", heads=2, length=600, dim=8, direction="both"),
    MaskedAttention(kind="neighbourhood", heads=2, length=196, dim=8, dtype="bf16"),
    MaskedAttention(kind="pair-bias", batch=5, heads=2, length=24, dim=8, direction="both"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, quick_rates: None) -> None:
    monkeypatch.setitem(MODELS, "llama-small", SMALL)


# Rows


def test_a_row_becomes_a_problem_for_each_type_and_pass() -> None:
    row = {"op": "ffn", "kind": "gelu", "tokens": 8, "embed": 16, "hidden": 32,
           "dtypes": ["f32", "bf16"], "passes": ["forward", "backward"]}  # fmt: skip
    found = suites.expand(row, "mine", suites.Selection())
    assert [(x.dtype, x.direction) for x in found] == [
        *(("f32", "forward"), ("f32", "backward"), ("bf16", "forward"), ("bf16", "backward")),
    ]
    assert str(found[0]) == "ffn gelu tokens=8 embed=16 hidden=32 f32 forward" and found[0].suite == "mine"
    (chosen,) = suites.expand(row, "mine", suites.Selection(("f16",), ("both",), (True,)))
    assert (chosen.dtype, chosen.direction) == ("f16", "both")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_problem_is_found_again_by_its_shape(problem: Any) -> None:
    (found,) = suites.shape(problem.shape_option, suites.Selection((problem.dtype,), (problem.direction,)))
    assert found == problem
    assert set(problem.line()) >= {"suite", "op", "pass", "dtype", "sizes", "causal", "features"}


def test_a_pass_that_an_operation_lacks_is_left_out() -> None:
    assert suites.shape("op=rope heads=2 length=8 dim=8", suites.Selection(passes=("backward",))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("op=dance m=1", "op: expected one of attention, gemm, ffn, .*, got 'dance'"),
        ("op=gemm m=1 n=2", "gemm: expected m, n, k, got no k"),
        ("op=gemm m=1 n=2 k=0", "k: expected 1 or above, got 0"),
        ("op=gemm m=1 n=2 k=4 hq=8", "expected keys among .*, got 'hq'"),
        ("op=ffn kind=odd tokens=1 embed=2 hidden=2", "kind: expected gelu, swiglu, got 'odd'"),
        (
            "op=masked-attention kind=neighbourhood heads=1 length=200 dim=8",
            "length: expected a square of 13 or above, got 200",
        ),
        ("op=layer model=mine tokens=4", "model: expected vit-b/16, .*, got 'mine'"),
        ("op=layer model=llama-2-7b tokens=5000", "tokens: expected at most llama-2-7b's 4096, got 5000"),
    ],
)
def test_a_bad_row_is_named(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=f"--shape: {message}"):
        suites.shape(text)


# Work


def test_work_is_counted_as_the_documents_say() -> None:
    gemm = Gemm(m=3, n=5, k=7)
    assert gemm.flops == 2 * 3 * 5 * 7 and gemm.bytes == 4 * (21 + 35 + 15)
    assert replace(gemm, direction="backward").flops == 2 * gemm.flops
    network = Ffn(kind="swiglu", tokens=3, embed=5, hidden=7, dtype="bf16")
    assert network.flops == 3 * 2 * 3 * 5 * 7 and network.bytes == 2 * (3 * 35 + 2 * 15)
    layer = Layer(model="llama-small", tokens=10)
    products = 48 * (12 * (2 * 4 + 2 * 2) + 3 * 64)
    assert layer.flops == 2 * 10 * products + 4 * 4 * 12 * 10 * 10 / 2
    step = DecodeStep(model="llama-small", batch=2, context=10)
    assert step.bytes == 4 * (products + 2 * 2 * 2 * 10 * 12)


# Results


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ours_and_pytorchs_compute_the_same(problem: Any, device: torch.device) -> None:
    every = [x for x in kinds.taking_part(problem.op, device) if not x.on_demand]
    lines = measure.measure(problem, every, measure.Settings(device, seconds=0.0, limit_ms=60_000), Record())
    timed = [line for line in lines if line["ms"]]
    assert {summary.ours(line) for line in timed} == {True, False}, lines
    eager = next(line for line in timed if line["impl"] == calls.EAGER)
    for line in timed:
        assert (
            line["tflops"] > 0 < line["gbps"] and line["relative_error"] <= 3 * eager["relative_error"] + 1e-6
        )


MASKED = [problem for problem in PROBLEMS if isinstance(problem, MaskedAttention)]


@pytest.mark.parametrize("problem", MASKED, ids=str)
def test_flex_attention_is_asked_for_the_same(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By FlexAttention's plain form, which computes all scores, as compiling takes long."""
    monkeypatch.setattr(masked, "compiled_flex", lambda: flex_attention)
    problem = replace(problem, dtype="f32", direction="forward")
    (flex,) = (x for x in kinds.taking_part(problem.op, CPU) if x.name == masked.FLEX)
    arguments = kinds.inputs(problem, CPU)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        found = flex.bind(problem, arguments)()
        expected = calls.bind_eager(problem, arguments)()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class FakeGraph:
    """A CUDA graph that remembers a capture and counts how often it is replayed."""

    captured: Any = None
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.mark.parametrize(("graph", "plain"), [("tilewise graph", "tilewise"), ("torch graph", calls.EAGER)])
def test_a_decode_step_from_a_graph_is_called_once_to_warm_up_and_once_to_capture(
    graph: str, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it is replayed, and the tensors of the capture have the result."""
    called: list[str] = []
    for name in ("ours", "theirs"):
        of_problem = getattr(DecodeStep, name)

        def counted(self: Any, *values: Any, name: str = name, of_problem: Any = of_problem) -> Any:
            called.append(name)
            return of_problem(self, *values)

        monkeypatch.setattr(DecodeStep, name, counted)
    monkeypatch.setattr(DecodeStep, "kernels", classmethod(lambda cls, device: ["tilewise"]))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda graph: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    problem = DecodeStep(model="llama-small", batch=2, context=12)
    every = {x.name: x for x in calls.all_for(DecodeStep, torch.device("cuda"))}
    assert every[graph].ours == every[plain].ours and every[calls.COMPILED_GRAPH].on_demand
    arguments = kinds.inputs(problem, CPU)
    replay = every[graph].bind(problem, arguments)
    assert called == ["ours" if plain == "tilewise" else "theirs"] * 2
    first, second = replay(), replay()
    assert FakeGraph.replays == 2 and len(called) == 2 and first is second
    torch.testing.assert_close(first, calls.bind_eager(problem, arguments)())


def test_the_reference_is_not_asked_for_large_problems() -> None:
    problem = Gemm(m=4096, n=4096, k=4096)
    with pytest.raises(CannotTake, match="too slow for more than"):
        calls.bind_ours("reference", problem, kinds.inputs(Gemm(m=2, n=2, k=2), CPU))


def test_a_wrong_result_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Gemm(m=5, n=8, k=8)
    monkeypatch.setattr(Gemm, "ours", lambda self, kernel, *values: 1.5 * self.theirs(*values))
    ours = [x for x in kinds.taking_part("gemm", CPU) if x.ours]
    for line in measure.measure(problem, ours, measure.Settings(CPU, seconds=0.0, limit_ms=60_000), Record()):
        assert line["relative_error"] == pytest.approx(0.5, rel=1e-3)
    monkeypatch.setattr(Gemm, "ours", lambda self, kernel, *values: self.theirs(*values) * float("nan"))
    for line in measure.measure(problem, ours, measure.Settings(CPU, seconds=0.0, limit_ms=60_000), Record()):
        assert line["skipped"].startswith("WRONG")


def test_compiled_pytorch_takes_part_on_demand(tmp_path: Path) -> None:
    settings = measure.Settings(CPU, seconds=0.0, limit_ms=60_000)
    suite = suites.Suite("mine", "", ("cpu",), (Norm(kind="rms", rows=6, dim=32),))
    names = {
        asked: [
            x.name
            for x in running.Plan(settings, [], [], tmp_path, compiled=asked).implementations(suite, "norm")
        ]
        for asked in (False, True)
    }
    assert names[False] == ["tilewise", calls.EAGER] and names[True] == [*names[False], calls.COMPILED]


def test_compiled_pytorch_gives_the_same() -> None:
    compiled = [x for x in kinds.taking_part("norm", CPU) if x.name == calls.COMPILED]
    problem = Norm(kind="rms", rows=6, dim=32)
    (line,) = measure.measure(
        problem, compiled, measure.Settings(CPU, seconds=0.0, limit_ms=60_000), Record()
    )
    assert line["ms"] and line["relative_error"] < 1e-6


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_hugging_faces_layer_has_the_same_weights(direction: str) -> None:
    pytest.importorskip("transformers")
    theirs = [x for x in kinds.taking_part("layer", CPU) if x.name == hugging_face.NAME]
    settings = measure.Settings(CPU, seconds=0.0, limit_ms=60_000)
    problem = Layer(model="llama-small", batch=2, tokens=9, direction=direction)
    (line,) = measure.measure(problem, theirs, settings, Record())
    assert line["ms"] and line["relative_error"] < 1e-5
    (line,) = measure.measure(Layer(model="bert-base", tokens=5), theirs, settings, Record())
    assert "Llama" in line["skipped"]


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_is_chosen_takes_part(op: str) -> None:
    problem = next(problem for problem in PROBLEMS if problem.op == op)
    assert kinds.chosen(problem, CPU) in [x.name for x in kinds.taking_part(op, CPU)]


# Commands


SHAPES = ["--shape", "op=gemm m=8 n=16 k=16", "--shape", "op=ffn kind=gelu tokens=4 embed=16 hidden=32"]


def test_bench_records_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *SHAPES, "--shape", "hq=2 sq=16 d=8", "--seconds", "0", "--device", "cpu"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/shape.jsonl")
    rows = read(path).rows
    assert {row["op"] for row in rows} == {"attention", "gemm", "ffn"}
    assert {row["impl"] for row in rows if row["op"] == "gemm"} == {"reference", "simd", calls.EAGER}
    assert "gemm m=8 n=16 k=16" in (path.parent / "report.html").read_text()
    assert cli.main(["roofline", str(path)]) == 0 and "gemm m=8" in capsys.readouterr().out


def test_an_interrupted_run_knows_its_rows(tmp_path: Path) -> None:
    problems = tuple(Gemm(suite="mine", m=m, n=8, k=8) for m in (2, 3))
    plan = running.Plan(
        measure.Settings(CPU, seconds=0.0, limit_ms=60_000),
        [suites.Suite("mine", "", ("cpu",), problems)],
        [],
        tmp_path,
    )
    (path,), _ = running.run(plan)
    lines = path.read_text().splitlines()
    kept = [line for line in lines if '"finished"' not in line and '"m": 3' not in line]
    path.write_text("\n".join(kept) + "\n")
    running.run(plan)
    rows = [json.loads(line) for line in path.read_text().splitlines() if '"sizes"' in line]
    assert [row["sizes"]["m"] for row in rows] == [2, 2, 2, 3, 3, 3]


def test_check_takes_operations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *SHAPES, "--device", "cpu", "--dtype", "f32,bf16"]) == 0
    assert "0 with more than twice" in capsys.readouterr().out


def test_profile_takes_operations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *SHAPES[:2], "--device", "cpu"]) == 0
    assert "gemm m=8 n=16 k=16" in capsys.readouterr().out


# Reports


def lines(impl: str, gain: float) -> list[dict[str, Any]]:
    found = []
    for tokens in (64, 512, 4096):
        problem = Ffn(suite="ffn", kind="gelu", tokens=tokens, embed=64, hidden=256)
        ms = tokens * 1e-3 * gain
        figures = {"ms": ms, "spread": 0.01, "tflops": problem.flops / ms * 1e-9, "gbps": 1.0, "peak_mb": 1.0}
        found.append({**problem.line(), **figures, "impl": impl, "device": "cuda", "error": 1e-6})
    return found


def test_reports_draw_operations() -> None:
    record = Record(environment={"gpu": "Example"}, rows=lines("chunked", 1.0) + lines(calls.EAGER, 1.5))
    (growth,) = plots.growths(summary.races(record.rows))
    assert growth.size == "tokens" and growth.title == "forward · f32 · ffn gelu embed=64 hidden=256"
    assert "1.50 times as fast as the fastest peer in the median of 3" in summary.conclusion(record)[0]
    page = report.page([record])
    assert "ffn gelu tokens=512" in page and "var(--s-chunked)" in page


def test_documents_have_a_table_for_each_operation() -> None:
    rates = [{"op": "rate", "impl": "gemm", "dtype": "f32", "tflops": 40.0},
             {"op": "rate", "impl": "copy", "dtype": None, "gbps": 1000.0}]  # fmt: skip
    environment = {"gpu": "Example", "torch": "2.10", "date": "2020-01-02T03"}
    record = Record(environment, rates, lines("chunked", 1.0) + lines(calls.EAGER, 1.5))
    text = layer_figures.section([record])
    assert text.startswith("Example, PyTorch 2.10, 2020-01-02: medians")
    row = next(line for line in text.splitlines() if "tokens=512" in line)
    assert row.startswith(
        "| gelu tokens=512 embed=64 hidden=256 | f32 | forward | 0.512 | chunked | 0.768 | 1.50 |"
    )
    assert row.count("|") == text.splitlines()[2].count("|")
    assert layer_figures.section([Record(rows=[])]) == layer_figures.NOTHING
