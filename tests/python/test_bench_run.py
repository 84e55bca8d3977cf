"""Running: implementations agree with float64, failures are rows, and an interrupted run goes on."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tilewise.bench import exact, implementations, measure
from tilewise.bench import run as running
from tilewise.bench.implementations import Implementation
from tilewise.bench.operands import Operands
from tilewise.bench.problem import Problem
from tilewise.bench.records import FIGURES, Record, read
from tilewise.bench.suites import Suite

pytestmark = pytest.mark.usefixtures("quick_rates")
CPU = torch.device("cpu")
SMALL = Problem(suite="small", hq=2, hkv=1, sq=20, sk=20, d=8, dv=8)
SCHEMA = {
    *("suite", "op", "pass", "impl", "device", "dtype", "b", "hq", "hkv", "sq", "sk", "d", "dv"),
    *("causal", "window", "ms", "spread", "tflops", "gbps", "peak_mb", "error"),
}


def settings(device: torch.device = CPU, **more: Any) -> measure.Settings:
    # On a busy machine anything may take longer than the usual limit.
    return measure.Settings(device, seconds=0.0, **({"limit_ms": 60_000.0} | more))


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


def test_peers_that_are_absent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(implementations.PACKAGES)
    assert every == ["flash-attn", "flash-attn 3", "flash-attn 4", "xformers", "flashinfer"]
    monkeypatch.setattr(implementations, "_installed", lambda module: module == "xformers")
    assert implementations.absent() == [name for name in every if name != "xformers"]
    cuda = torch.device("cuda")
    assert [x.name for x in implementations._peers(cuda) if x.name in every] == ["xformers"]
    said = "peers that are not installed: flash-attn, flash-attn 3, flash-attn 4, flashinfer"
    assert implementations.missing(cuda) == said
    assert implementations.missing(CPU).startswith("peers for CUDA devices only: flash-attn,")
    monkeypatch.setattr(implementations, "_installed", lambda module: True)
    assert implementations.missing(cuda) == "peers that are not installed: none"


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
        "flash_attn.cute": SimpleNamespace(flash_attn_func=lambda *a, **k: (attend(*a, **k), None)),
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
        implementations.bind_flash_attn_4,
        implementations.bind_xformers,
        implementations.bind_flashinfer,
    ]
    every = [Implementation(str(n), False, bind) for n, bind in enumerate(binds)]
    for line in measure.measure(problem, every, settings(), Record()):
        assert line["ms"] is not None and line["error"] < 0.05, line
    masked = measure.measure(replace(problem, mask="additive"), every, settings(), Record())
    assert all("is not measured with mask" in line["skipped"] for line in masked)


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [(None, False, (None, None)), (None, True, (None, None)), (6, False, (6, 6)), (6, True, (6, 0))],
)
def test_flash_attention_4_has_windows_in_its_own_words(
    window: int | None, causal: bool, expected: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def attend(q: torch.Tensor, k: Any, v: Any, **options: Any) -> torch.Tensor:
        seen.update(options)
        return q

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=attend))
    problem = replace(SMALL, window=window, causal=causal, dtype="bf16", deterministic=True)
    implementations.bind_flash_attn_4(problem, Operands.random(problem, CPU))()
    assert seen == {"window_size": expected, "causal": causal, "deterministic": True}


def test_flash_attention_4_alone_is_not_taken_for_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package has the same name at the top, with nothing of FlashAttention-2 in it."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [x.name for x in implementations._peers(torch.device("cuda"))]
    assert "flash-attn 4" in names and "flash-attn" not in names
    (folder.parent / "flash_attn_interface.py").touch()
    importlib.invalidate_caches()
    assert "flash-attn" in [x.name for x in implementations._peers(torch.device("cuda"))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_suites_own_limit_counts_on_a_gpu_where_none_is_given(tmp_path: Path) -> None:
    slow = Suite("slow", "", ("cuda",), (), limit_ms=400.0)
    for device, own, expected in (("cuda", True, 400.0), ("cuda", False, 100.0), ("cpu", True, 100.0)):
        given = measure.Settings(torch.device(device), limit_ms=100.0)
        plan = running.Plan(given, [slow], (), tmp_path, own_limits=own)
        found = plan.settings_of(slow)
        assert found.limit_ms == expected and found.seen_rates is given.seen_rates
        assert plan.settings_of(replace(slow, limit_ms=None)) is given


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
    assert line["skipped"] == "FlexAttention is not measured with deterministic"


def test_flex_is_exact_and_compiled_once_for_all_windows() -> None:
    flex = [x for x in implementations.all_for(CPU) if x.name == "torch flex"]
    for window in (3, 7):
        torch._dynamo.utils.counters.clear()
        problem = replace(SMALL, sq=200, sk=200, d=16, dv=16, window=window, causal=True)
        (line,) = measure.measure(problem, flex, settings(), Record())
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


def test_a_problem_too_large_to_make_is_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    monkeypatch.setattr(measure.kinds, "inputs", fail)
    every = implementations.all_for(CPU)[:3]
    lines = measure.measure(SMALL, every, settings(), Record())
    assert [line["impl"] for line in lines] == [x.name for x in every]
    for line in lines:
        assert line["skipped"] == "out of memory" and all(line[key] is None for key in FIGURES)


def test_a_call_that_fails_only_when_timed_has_no_figure_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory for the second set")

    monkeypatch.setattr(measure.timing, "race", fail)
    record = Record()
    for line in measure.measure(SMALL, implementations.all_for(CPU)[:2], settings(), record):
        assert line["ms"] is None and line["tflops"] is None
        assert line["skipped"] == "no memory for the second set"
    assert not record.rates


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_round_their_factors_results_and_gradients(dtype: torch.dtype) -> None:
    """What PyTorch's own error is taken of for kernels that round P, S and their gradients."""
    a, b = (torch.randn(5, 5, requires_grad=True) for _ in range(2))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(dtype).float()

    with exact.SixteenBitProducts(dtype):
        out = a @ b
        scores = out * (1 / 3) + 1e-4  # no product, so it keeps all digits
    assert torch.equal(out, rounded(rounded(a) @ rounded(b))) and not torch.equal(out, a @ b)
    assert not torch.equal(scores, rounded(scores))
    grad = torch.randn(5, 5)
    with exact.SixteenBitProducts(dtype):
        found = torch.autograd.grad(a @ b, (a, b), grad)
    expected = (rounded(grad) @ rounded(b).T, rounded(a).T @ rounded(grad))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, rounded(y))


def test_the_bound_of_a_rounding_kernel_is_that_of_products_of_16_bits() -> None:
    problem = replace(SMALL, dtype="bf16", direction="both")
    check = exact.Check(problem, Operands.random(problem, CPU), 1e9)
    (rounding,) = sorted(exact.ROUNDING)[:1]
    plain, half = check.of_torch("simd"), check.of_torch(rounding)
    assert len(plain) == len(half) == len(check.names) == 4
    assert all(a.rms < b.rms for a, b in zip(plain, half, strict=True))
    assert check.of_torch(rounding) is half  # made once


def test_dropout_has_no_truth_to_compare_with() -> None:
    problem = replace(SMALL, dropout=0.5)
    check = exact.Check(problem, Operands.random(problem, CPU), 1e9)
    assert check([torch.zeros(1)]) == [] and check.of_torch("simd") == []


def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(measure.DeviceLost, match=r"naive on h2 .* unusable: CUDA error: an illegal"):
        measure._check_device(torch.device("cuda"), "naive on h2 s20 d8 f32 forward")
    measure._check_device(CPU, "simd")


def test_nan_is_wrong_and_slow_is_left_out() -> None:
    wrong = Implementation("nan", True, lambda p, o: lambda: o.q * float("nan"))
    (line,) = measure.measure(SMALL, [wrong], settings(), Record())
    assert line["skipped"].startswith("WRONG")
    simd = next(x for x in implementations.all_for(CPU) if x.name == "simd")
    (line,) = measure.measure(SMALL, [simd], settings(limit_ms=0.0), Record())
    assert "--limit-ms is 0" in line["skipped"]
    times = iter((900.0, 1.0))  # what compiles a second time is not left out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.timing, "once_ms", lambda *_: next(times))
        (line,) = measure.measure(SMALL, [simd], settings(limit_ms=500.0), Record())
    assert "skipped" not in line and line["ms"] > 0
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
    with pytest.raises(ValueError, match=r"--out: .* was interrupted with torch 1.0, but it is"):
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
