"""Running: implementations agree with float64, failures are rows, and an interrupted run goes on."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tilewise import cli
from tilewise.bench import environment, exact, implementations, measure, profile, rates, records, timing
from tilewise.bench import run as running
from tilewise.bench.implementations import Implementation
from tilewise.bench.operands import Operands
from tilewise.bench.problem import BadInput, Problem
from tilewise.bench.records import FIGURES, Record, read
from tilewise.bench.suites import Suite

CPU = torch.device("cpu")
SMALL = Problem(suite="small", hq=2, hkv=1, sq=20, sk=20, d=8, dv=8)
QUERY = torch.ones(1, 1, 4, 8)
SCHEMA = {
    *("suite", "op", "pass", "impl", "device", "dtype", "b", "hq", "hkv", "sq", "sk", "d", "dv"),
    *("causal", "window", "ms", "spread", "tflops", "gbps", "peak_mb", "error"),
}


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_gemm_size", lambda device: 32)
    monkeypatch.setattr(rates, "copy_gbps", lambda device: 10.0)


def settings(device: torch.device = CPU, **more: Any) -> measure.Settings:
    return measure.Settings(device, seconds=0.0, **more)


def suite(*problems: Problem) -> Suite:
    return Suite("small", "", ("cpu",), problems or (SMALL, replace(SMALL, direction="backward")))


def broken(error: Exception) -> Implementation:
    def bind(problem: Problem, operands: Operands) -> Callable[[], Any]:
        raise error

    return Implementation("broken", False, bind)


# Implementations


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        replace(SMALL, causal=True, direction="backward"),
        replace(SMALL, sk=30, causal=True, direction="both"),
        replace(SMALL, sq=1, sk=40, causal=True, dtype="bf16"),
        replace(SMALL, mask="additive", causal=True),
        replace(SMALL, mask="padding", b=2, direction="backward"),
        replace(SMALL, window=4, dtype="f16"),
        replace(SMALL, sq=200, sk=300, blocks=0.4, direction="backward"),
        replace(SMALL, dv=12, hq=3, hkv=3),
    ],
    ids=str,
)
def test_all_implementations_compute_the_same(problem: Problem, device: torch.device) -> None:
    every = [x for x in implementations.all_for(device) if not x.on_demand]
    assert sum(x.ours for x in every) >= 2 <= sum(not x.ours for x in every)
    options = measure.Settings(device, seconds=0.0)
    lines = measure.measure(problem, every, options, Record())
    ran = [line for line in lines if line["ms"] is not None]
    assert len(ran) >= 2, lines
    for line in ran:
        assert set(line) >= SCHEMA and line["ms"] > 0 and line["tflops"] > 0 and line["peak_mb"] > 0
        assert line["error"] < {"f32": 1e-4, "f16": 1e-2, "bf16": 1e-1}[problem.dtype], line


def test_reference_is_the_same_in_pieces() -> None:
    problem = Problem(b=2, hq=4, hkv=2, sq=50, sk=70, d=8, dv=8, causal=True, direction="both")
    operands = Operands.random(problem, CPU)
    groups = exact.groups_within(problem, 1e12)
    assert groups == [(0, 0), (0, 1), (1, 0), (1, 1)] and len(exact.groups_within(problem, 0)) == 1
    whole = exact.compute(problem, operands, groups)
    parts = [exact.compute(problem, operands, [group]) for group in groups]
    for n, result in enumerate(whole):
        assert torch.equal(result, torch.cat([part[n] for part in parts]))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.detach().double() for x in operands.inputs),
        torch.ones(50, 70, dtype=torch.bool).tril(20),
        enable_gqa=True,
    )
    assert torch.allclose(exact.of_groups(expected, groups, 2), whole[0])


def test_peers_that_are_not_installed_are_not_there() -> None:
    names = [x.name for x in implementations.all_for(CPU)]
    assert names == ["reference", "simd", "torch math", "torch flash", "torch flex"]
    assert not implementations._installed("no_such_package_of_attention")


def test_packages_of_peers_are_called_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packages, which take [B, S, H, D] (FlashInfer [S, H, D]) and compute it."""

    def attend(q: Any, k: Any, v: Any, causal: bool = False, **_: Any) -> Any:
        rows = [x.transpose(-3, -2) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True)
        return out.transpose(-3, -2)

    xformers = SimpleNamespace(
        memory_efficient_attention=lambda q, k, v, attn_bias: attend(q, k, v, attn_bias is not None),
        fmha=SimpleNamespace(attn_bias=SimpleNamespace(LowerTriangularFromBottomRightMask=object)),
    )
    modules = {
        "flash_attn": SimpleNamespace(flash_attn_func=attend),
        "flash_attn_interface": SimpleNamespace(flash_attn_func=lambda *a, **k: (attend(*a, **k), None)),
        "xformers": SimpleNamespace(ops=xformers),
        "xformers.ops": xformers,
        "flashinfer": SimpleNamespace(single_prefill_with_kv_cache=attend),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    problem = replace(SMALL, hkv=2, causal=True, dtype="bf16")
    binds = [
        lambda p, o: implementations.bind_flash_attn("flash_attn", p, o),
        lambda p, o: implementations.bind_flash_attn("flash_attn_interface", p, o),
        implementations.bind_xformers,
        implementations.bind_flashinfer,
    ]
    every = [Implementation(str(n), False, bind) for n, bind in enumerate(binds)]
    for line in measure.measure(problem, every, settings(), Record()):
        assert line["ms"] is not None and line["error"] < 0.05, line
    masked = measure.measure(replace(problem, mask="additive"), every, settings(), Record())
    assert all("is not asked for mask" in line["skipped"] for line in masked)


def test_deterministic_is_asked_of_each_in_its_own_way() -> None:
    seen: list[bool] = []

    def bind(problem: Problem, operands: Operands) -> Callable[[], Any]:
        def attend() -> Any:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return torch.nn.functional.scaled_dot_product_attention(*operands.inputs, enable_gqa=True)

        return attend

    asked = replace(SMALL, direction="both", deterministic=True)
    for ours, problem, expected in ((False, asked, True), (False, SMALL, False), (True, asked, False)):
        seen.clear()
        (line,) = measure.measure(problem, [Implementation("x", ours, bind)], settings(), Record())
        assert line["ms"] and set(seen) == {expected}
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    call = implementations.bind_tilewise("simd", asked, Operands.random(asked, CPU))
    assert isinstance(call, functools.partial) and call.keywords["deterministic"]
    flex = [x for x in implementations.all_for(CPU) if x.name == "torch flex"]
    (line,) = measure.measure(asked, flex, settings(), Record())
    assert line["skipped"] == "FlexAttention is not asked for deterministic"


def test_flex_is_exact_and_compiled_once_for_all_windows() -> None:
    flex = [x for x in implementations.all_for(CPU) if x.name == "torch flex"]
    for window in (3, 7):
        torch._dynamo.utils.counters.clear()
        problem = replace(SMALL, sq=200, sk=200, d=16, dv=16, window=window, causal=True)
        (line,) = measure.measure(problem, flex, settings(limit_ms=60_000), Record())
        assert line["ms"] and line["error"] < 1e-5, line
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


# Failures


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("No kernel\nfor this"), "No kernel for this"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (ImportError(""), "ImportError"),
    ],
)
def test_what_fails_is_a_row_that_says_so(error: Exception, reason: str) -> None:
    every = [broken(error), *implementations.all_for(CPU)[:2]]
    lines = measure.measure(SMALL, every, settings(), Record())
    assert lines[0]["skipped"] == reason and all(lines[0][key] is None for key in FIGURES)
    assert set(lines[0]) >= SCHEMA and all(line["ms"] for line in lines[1:])


def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(measure.DeviceLost, match=r"naive on h2 .* cannot be used: CUDA error: an illegal"):
        measure._check_device(torch.device("cuda"), "naive on h2 s20 d8 f32 forward")
    measure._check_device(CPU, "simd")


def test_nan_is_wrong_and_slow_is_left_out() -> None:
    wrong = Implementation("nan", True, lambda p, o: lambda: o.q * float("nan"))
    (line,) = measure.measure(SMALL, [wrong], settings(), Record())
    assert line["skipped"].startswith("WRONG")
    simd = next(x for x in implementations.all_for(CPU) if x.name == "simd")
    (line,) = measure.measure(SMALL, [simd], settings(limit_ms=0.0), Record())
    assert "--limit-ms is 0" in line["skipped"]
    options = settings(limit_ms=100.0)
    options.seen_rates["attention", "simd", "f32", "forward"] = 1e-12
    (line,) = measure.measure(SMALL, [simd], options, Record())
    assert line["skipped"].startswith("one run would take")


# Runs


def plan(folder: Path, *problems: Problem, **more: Any) -> running.Plan:
    return running.Plan(settings(), [suite(*problems)], ["simd", "torch math"], folder, **more)


def test_a_run_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, finished = running.run(plan(tmp_path))
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert finished and files[0].name == "small.jsonl"
    assert lines[0]["environment"]["torch"] == torch.__version__ and "finished" in lines[-1]
    assert {line["impl"] for line in lines if line.get("op") == "rate"} == {"gemm", "copy"}
    rows = read(files[0]).rows
    assert [(row["impl"], row["pass"]) for row in rows] == [
        (impl, direction) for direction in ("forward", "backward") for impl in ("simd", "torch math")
    ]
    assert "h2/1 s20 d8 f32 backward" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, measured = measure.measure, []

    def stops_at_the_second(problem: Problem, *arguments: Any) -> Any:
        measured.append(problem.direction)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(problem, *arguments)

    monkeypatch.setattr(measure, "measure", stops_at_the_second)
    files, finished = running.run(plan(tmp_path))
    kept = read(files[0]).rows
    assert not finished and len(kept) == 2 and not read(files[0]).finished
    with files[0].open("a") as file:
        file.write('{"suite": "small", "op": "atten')  # the machine went down while it wrote
    files, finished = running.run(plan(tmp_path))
    assert finished and measured == ["forward", "backward", "backward"]
    assert read(files[0]).rows[:2] == kept and len(read(files[0]).rows) == 4
    running.run(plan(tmp_path))  # a finished one is made anew
    assert measured[3:] == ["forward", "backward"]


def test_suites_before_the_interrupted_one_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, measured = measure.measure, []

    def stops_at_the_second(problem: Problem, *arguments: Any) -> Any:
        measured.append(problem.suite)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(problem, *arguments)

    monkeypatch.setattr(measure, "measure", stops_at_the_second)
    first, second = (Suite(name, "", ("cpu",), (replace(SMALL, suite=name),)) for name in ("one", "two"))
    both = running.Plan(settings(), [first, second], ["simd"], tmp_path)
    assert not running.run(both)[1] and running.run(both)[1]
    assert measured == ["one", "two", "two"]


def test_a_run_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not come to keeps its record, and the same command goes on."""
    one, two = (Suite(name, "", ("cpu",), (replace(SMALL, suite=name),)) for name in ("one", "two"))
    both = running.Plan(settings(), [one, two], ["simd"], tmp_path)
    files, _ = running.run(both)
    before = [path.read_text() for path in files]
    both.within = 0.0
    assert running.run(both) == (files, None)
    assert [path.read_text() for path in files] == before

    monkeypatch.setattr(running.Progress, "seconds", property(lambda self: float(self.done)))
    both.within = 0.5  # enough for one problem
    assert running.run(both)[1] is None
    assert files[0].read_text() != before[0] and not read(files[0]).finished and len(read(files[0]).rows) == 1
    assert files[1].read_text() == before[1]
    both.within = None
    assert running.run(both)[1] and all(read(path).finished for path in files)


def test_another_setting_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    files, _ = running.run(plan(tmp_path))
    text = files[0].read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"')
    files[0].write_text(text)
    with pytest.raises(ValueError, match=r"--out: .* was interrupted with torch 1.0, and here it is"):
        running.run(plan(tmp_path))
    running.run(plan(tmp_path, fresh=True))


def test_time_left_is_shown_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    terminal = Terminal()
    progress = running.Progress(3, terminal)  # type: ignore[arg-type]
    progress.show(SMALL)
    progress.step()
    progress.start -= 60
    progress.show(SMALL)
    assert "[1/3] small: h2/1 s20 d8" in terminal.text and "about 2:00 left" in terminal.text


def test_rounds_rotate_and_medians_are_taken() -> None:
    assert [timing.rotated("abc", n) for n in range(4)] == [
        list("abc"),
        list("bca"),
        list("cab"),
        list("abc"),
    ]
    calls: list[str] = []
    entrants = {name: timing.Entrant([lambda name=name: calls.append(name)]) for name in "ab"}
    result = timing.race(entrants, CPU, 20, 0.0)
    assert all(found.runs >= timing.LEAST_CPU_ROUNDS for found in result.values())


class SimulatedGpu:
    """A host and a GPU with a clock each, in milliseconds; what is issued runs in order, after its issue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.gpu = 0.0
        self.sleeps: list[float] = []
        simulated = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = simulated.gpu = max(simulated.host, simulated.gpu)

            def query(self) -> bool:
                return self.at <= simulated.host

            def synchronize(self) -> None:
                simulated.host = max(simulated.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: 1e-3 * self.host)

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / 1e6)
        self.run(0.0, self.sleeps[-1])

    def run(self, issue: float, ms: float) -> None:
        self.host += issue
        self.gpu = max(self.host, self.gpu) + ms

    def race(self, entrants: dict[str, timing.Entrant]) -> dict[str, timing.Timing]:
        found = timing.race(entrants, torch.device("cuda"), 20, 0.0)
        self.sleeps = self.sleeps[2:]  # the first two tell how long a cycle is
        return found


class Simulated:
    """A call that takes `issue` of the host and `ms` of the GPU, and more of the host at times."""

    def __init__(
        self, gpu: SimulatedGpu, issue: float, ms: float, more: dict[int, float] | None = None
    ) -> None:
        self.gpu, self.issue, self.ms, self.more = gpu, issue, ms, more or {}
        self.count = 0

    def __call__(self) -> None:
        self.gpu.run(self.issue + self.more.get(self.count, 0.0), self.ms)
        self.count += 1


def test_gpu_rounds_are_issued_behind_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take longer to issue than to run, and are late in one round."""
    gpu = SimulatedGpu(monkeypatch)
    calls: list[tuple[str, int]] = []

    def call(name: str, n: int) -> None:
        calls.append((name, n))
        gpu.run(20.0 if len(calls) == 9 else 0.02, {"a": 0.01, "b": 0.02}[name])

    entrants = {
        name: timing.Entrant([lambda name=name, n=n: call(name, n) for n in range(3)]) for name in "ab"
    }
    found = gpu.race(entrants)
    assert {name: x.runs for name, x in found.items()} == {"a": 20, "b": 20}
    assert found["a"].ms == pytest.approx(0.01) and found["b"].ms == pytest.approx(0.02)
    assert found["a"].spread == pytest.approx(0, abs=1e-6)  # the late round is in nobody's figure
    assert gpu.sleeps == pytest.approx([1.0] * 5 + [2.0] * 18)  # nor repeated more than once
    assert len(calls) == 2 * (20 + timing.WARM_UP_ROUNDS + 1) and {n for _, n in calls} == {0, 1, 2}


def test_rounds_to_warm_up_tell_how_long_a_head_start_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine models, of which the first call loads for long and one is slow: no round is repeated."""
    gpu = SimulatedGpu(monkeypatch)
    times = {f"model {n}": 10.0 + n for n in range(8)} | {"naive": 1600.0}
    calls = {name: Simulated(gpu, 3.0, ms, more={0: 200.0}) for name, ms in times.items()}
    found = gpu.race({name: timing.Entrant([call]) for name, call in calls.items()})
    assert {name: x.ms for name, x in found.items()} == pytest.approx(times)
    assert gpu.sleeps == pytest.approx([1.0] * 2 + [1.5 * 9 * 3.0] * 20)
    assert calls["naive"].count == timing.WARM_UP_ROUNDS + timing.SLOW_RUNS


def test_a_slow_round_that_was_late_is_repeated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(monkeypatch)
    late = dict.fromkeys(range(timing.WARM_UP_ROUNDS, 30), 500.0)  # as where its queue is full
    call = Simulated(gpu, 0.02, 200.0, more=late)
    gpu.race({"slow": timing.Entrant([call])})
    assert call.count == timing.WARM_UP_ROUNDS + 1 + timing.SLOW_RUNS
    assert gpu.sleeps == pytest.approx([1.0] * 3 + [timing.LONGEST_HEAD_START_MS] * timing.SLOW_RUNS)


def test_what_waits_for_the_gpu_is_not_repeated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(monkeypatch)

    def waits() -> None:  # and so is never issued in time
        gpu.run(0.02, 0.5)
        gpu.synchronize()

    found = gpu.race({"waits": timing.Entrant([waits])})
    assert found["waits"].ms == pytest.approx(0.5) and found["waits"].runs == 20
    assert gpu.sleeps[-20:] == pytest.approx([timing.LONGEST_HEAD_START_MS] * 20)
    assert len(gpu.sleeps) < 20 + timing.WARM_UP_ROUNDS + 8


def test_inputs_rotate_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50))
    assert timing.sets_past_cache(10) == 11 and timing.sets_past_cache(10**9) == 2
    assert timing.sets_past_cache(1) == timing.MOST_SETS


# The command


def test_bench_writes_records_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: torch.device
) -> None:
    shape = ["bench", "--shape", "hq=2 sq=16 d=8", "--seconds", "0"]
    arguments = [*shape, "--out", str(tmp_path), "--device", device.type]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "times as fast as the fastest peer" in printed and "report" in printed
    (page,) = tmp_path.glob("*/report.html")
    assert "Tilewise on" in page.read_text()
    assert cli.main(["roofline", str(tmp_path)]) == 0
    assert "bound by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--suite", "nothing"], "--suite: expected a file"),
        (["bench", "--shape", "hq=1"], "--shape: expected at least"),
        (
            ["bench", "--shape", "hq=1 sq=4 d=8", "--dtype", "f8"],
            "--dtype: expected f32, f16, bf16, got 'f8'",
        ),
        (["bench", "--shape", "hq=1 sq=4 d=8", "--pass", "up"], "--pass: expected forward, backward, both"),
        (["bench", "--kernels", "quick"], "--kernels: expected (parts of) reference, simd"),
        (["bench", "--runs", "3"], "--runs: expected 20 or more, got 3"),
        (["bench", "--threads", "0"], "--threads: expected 1 or more, got 0"),
        (["bench", "--threads", str(10**12)], "--threads: expected a number of threads, got 1000000000000"),
        (["bench", "--suite", "x" * 5000], "--suite: expected a file"),
        (
            ["explain", "--shape", "hq=1 sq=999999999 d=999999999"],
            "--shape: cannot make the tensors of h1 s999",
        ),
        (["explain", "--shape", f"hq=1 sq={10**30} d=8"], "--shape: cannot make the tensors of h1 s1000"),
        (
            ["check", "--shape", "hq=1 sq=999999999 d=999999999", "--device", "cpu"],
            "--shape: cannot make the",
        ),
        (["report", "nowhere"], "records: expected a file or folder, got 'nowhere'"),
        (["report", ".", "--png"], "--png: expected --plots with it"),
        (["explain", "--call", "nowhere"], "--call: cannot read nowhere"),
        (["profile", "--kernel", "nothing", "--device", "cpu"], "--kernel: expected one of reference"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_bad_input_is_one_line_that_names_the_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available() or "--device" in arguments or arguments[0] != "bench":
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"query": 1, "key": 2, "value": 3}, "query: expected Tensor, got int"),
        ({"query": QUERY, "key": QUERY, "value": QUERY, "colour": 1}, "unexpected keyword argument 'colour'"),
        ({"query": QUERY, "key": QUERY, "value": QUERY, 3: 1}, "keywords must be strings"),
    ],
    ids=["no tensors", "no argument", "no name"],
)
def test_a_saved_call_that_is_none_is_one_line(
    call: dict[Any, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(call, tmp_path / "call.pt")
    assert cli.main(["explain", "--call", str(tmp_path / "call.pt")]) == 2
    error = capsys.readouterr().err
    assert "--call: " in error and message in error and error.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/below", "file/below/it"])
def test_a_folder_that_cannot_be_is_said_before_anything_is_measured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(rates, "measure", lambda *given: pytest.fail("measured"))
    shape = ["bench", "--shape", "hq=2 sq=16 d=8", "--device", "cpu"]
    assert cli.main([*shape, "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert "--out: cannot write" in error and f"{tmp_path / 'file'} is no folder" in error
    assert error.count("\n") == 1 and (tmp_path / "file").read_text() == "no folder"


def test_a_folder_without_permission_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = [
        "bench",
        "--shape",
        "hq=2 sq=16 d=8",
        "--seconds",
        "0",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    with monkeypatch.context() as patch:  # root may write anywhere, so the system's answer is replaced
        patch.setattr(records.os, "access", lambda path, mode: False)
        assert cli.main(shape) == 2
    error = capsys.readouterr().err
    assert f"no permission in {tmp_path}" in error and error.count("\n") == 1

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    assert cli.main(shape) == 2
    error = capsys.readouterr().err
    assert "--out: cannot write" in error and "No space left on device" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x", "mps"])
def test_a_device_that_is_none_is_said(name: str) -> None:
    with pytest.raises(BadInput, match=f"--device: expected cpu or cuda, got '{name}'"):
        environment.choose_device(name)


def test_missing_gpu_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "--device: expected a device that is here, got cuda" in capsys.readouterr().err


def test_info_lists_kernels_and_simd(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "simd  " in printed and "kernels on cpu" in printed and "reference   usable" in printed


def test_explain_takes_options_and_saved_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["explain", "--shape", "hq=4 hkv=2 sq=16 d=8", "--causal", "yes", "--device", "cpu"]
    assert cli.main([*shape, "--gradient"]) == 0
    printed = capsys.readouterr().out
    assert "forward f32 dense B1 Hq4 Hkv2 Sq16" in printed and "causal" in printed and "backward" in printed
    x = torch.randn(1, 2, 6, 8)
    torch.save({"query": x, "key": x, "value": x, "window": (2, 0)}, tmp_path / "call.pt")
    assert cli.main(["explain", "--call", str(tmp_path / "call.pt")]) == 0
    assert "Sq6" in capsys.readouterr().out


def test_check_has_an_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["check", "--shape", "hq=2 sq=30 d=16", "--dtype", "f32", "--device", "cpu"]
    assert cli.main(arguments) == 0
    assert "8 results, 0 with more" in capsys.readouterr().out
    monkeypatch.setattr(exact, "within_contract", lambda *_: False)
    assert cli.main(arguments) == 1
    assert "BEYOND twice" in capsys.readouterr().out


# Profiles


def test_profile_on_a_cpu_says_what_bounds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--shape", "hq=2 sq=64 d=16", "--device", "cpu"]) == 0
    assert "Bound by" in capsys.readouterr().out


def test_ncus_table_is_read() -> None:
    fma = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active"
    stall = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
    output = f'''==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","{fma}","{stall}","launch__registers_per_thread"
"","","ns","%","inst","register/thread"
"0","fused(float)","1,500","72.5","1.25","168"
'''
    ((name, figures),) = profile.parse_ncu(output)
    assert name == "fused(float)" and figures["time"] == 1.5 and figures["registers a thread"] == 168
    text = profile.ncu_text(name, figures)
    assert "Bound by the FMA pipe, 72 % busy." in text and "stalled at barriers" in text
    assert profile.parse_ncu("no kernels were profiled") == []


def test_metrics_that_a_gpu_has_not_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ncu that refuses one metric, and gives one figure without it."""
    ncu = tmp_path / "ncu"
    ncu.write_text("""#!/bin/sh
case "$*" in
  *lts__throughput*) echo '==ERROR== no metric lts__throughput.avg.pct_of_peak_sustained_elapsed'; exit 1 ;;
esac
printf '"ID","Kernel Name","gpu__time_duration.sum"\\n"","","ns"\\n"0","fused","2500"\\n==PROF== done\\n'
""")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert profile.by_ncu(["program"]).splitlines()[:2] == ["fused", f"  {'time':24}{'2.5':>10} us"]


def test_nsyss_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nsys that talks before its table."""
    nsys = tmp_path / "nsys"
    nsys.write_text("""#!/bin/sh
if [ "$1" = stats ]; then
  printf 'Processing [profile.sqlite]...\\n\\nTime (%%),Total Time (ns),Instances,Avg (ns),Name\\n'
  printf '75.0,3000,2,1500.0,"fused(float, int)"\\n25.0,1000,1,1000.0,copy\\n'
fi
""")
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = profile.by_nsys(["program"]).splitlines()
    assert first.split() == ["75.0", "%", "1.5", "us", "fused(float,", "int)"] and second.endswith("copy")


def test_torchs_trace_is_read() -> None:
    launch = {"grid": [4, 8, 1], "block": [128, 1, 1], "registers per thread": 96, "shared memory": 2048}
    event = {"cat": "kernel", "name": "fused", "dur": 12.5, "args": launch}
    events = [event | {"ts": 2}, {"cat": "cpu_op", "name": "x"}, event | {"ts": 1, "name": "a"}]
    first, second = profile.parse_trace({"traceEvents": events})
    assert (first["name"], second["name"]) == ("a", "fused")
    text = profile.kernel_table([second])
    assert "12.5" in text and " 32 " in text and " 128 " in text and " 96" in text and " 2.0" in text


def test_the_watched_program_is_this_one_again() -> None:
    problem = replace(SMALL, window=4, causal=True, dtype="bf16")
    words = profile.command(problem, "fused")[3:]
    options = cli._parser().parse_args(words)
    assert options.watched and replace(cli._one_problem(options), suite="small") == problem
