"""Profiles: what ncu, nsys and torch say, and what bounds a kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import row, write
from tilewise import cli
from tilewise.bench import profile, profile_all, records, report
from tilewise.bench.implementations import CannotTake, Implementation
from tilewise.bench.problem import BadInput, Problem
from tilewise.bench.profile_all import Kernels, Target

pytestmark = pytest.mark.usefixtures("quick_rates")


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
    problem = Problem(
        suite="small", hq=2, hkv=1, sq=20, sk=20, d=8, dv=8, window=4, causal=True, dtype="bf16"
    )
    words = profile.command(problem, "fused")[3:]
    options = cli._parser().parse_args(words)
    assert options.watched and replace(cli._one_problem(options), suite="small") == problem


# Reports that stay, by stand-ins for ncu and nsys that write what they were asked to

SMALL = Problem(hq=2, hkv=2, sq=64, sk=64)
TARGETS = [Target("mma", SMALL), Target("tiled", SMALL)]
OPTIONS = ["--shape", "hq=2 sq=64 d=64"]
NCU = """#!/bin/sh
echo "$@" >> CALLS
if [ "$1" = --import ]; then
  printf '"ID","Kernel Name","gpu__time_duration.sum","sm__warps_active.avg.pct_of_peak_sustained_active"\\n'
  printf '"","","ns","%%"\\n"0","void mma::forward_kernel<float>(Call)","2500","12.5"\\n'
  exit 0
fi
case "$*" in
  *"--kernel tiled"*) echo 'tilewise: tiled: is for other problems'; exit 1 ;;
esac
while [ "$1" != --export ]; do shift; done
touch "$2"
"""
NSYS = """#!/bin/sh
echo "$@" >> CALLS
while [ "$1" != --output ]; do shift; done
touch "$2.nsys-rep"
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH. It has what the stand-ins need, and neither ncu nor nsys."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "touch").symlink_to("/bin/touch")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, script: str) -> Path:
    """A program that may write its arguments to a file, which is returned."""
    calls = folder / f"{name}.calls"
    (folder / name).write_text(script.replace("CALLS", str(calls)))
    (folder / name).chmod(0o755)
    return calls


def by_torch(target: Target) -> Kernels:
    if target.impl == "tiled":
        raise RuntimeError("kernel 'tiled' is for other problems")
    return [("void mma::forward_kernel<float>(Call)", {"time": 3.0, "occupancy": 25.0})]


def test_reports_of_ncu_and_nsys_are_kept(tmp_path: Path, tools: Path) -> None:
    ncu, nsys, out = put(tools, "ncu", NCU), put(tools, "nsys", NSYS), tmp_path / "out"
    found = profile_all.run(TARGETS, out, OPTIONS, by_torch)
    assert (out / "timeline.nsys-rep").exists() and (out / "mma-h2-s64-d64-f32-forward.ncu-rep").exists()
    assert found.tools == [
        f"nsys: a timeline with a range for each kernel, {out / 'timeline.nsys-rep'}",
        f"ncu: 1 of 2 reports, {out}/*.ncu-rep",
    ]
    assert found.kernels[TARGETS[0]][0][1] == {"time": 2.5, "occupancy": 12.5}
    assert found.refused == {TARGETS[1]: "tilewise: tiled: is for other problems"}
    asked = nsys.read_text()
    assert "--trace=cuda,nvtx" in asked and "profile --watched --all --shape hq=2 sq=64 d=64" in asked
    first, imported, second = ncu.read_text().splitlines()
    assert "--set detailed" in first and "--kernel mma" in first and imported.startswith("--import ")
    assert "--kernel tiled" in second
    text = found.text()
    assert "mma, h2 s64 d64 f32 forward\nmma::forward_kernel\n" in text and "occupancy" in text


def test_a_tool_that_is_not_there_is_named(tmp_path: Path, tools: Path) -> None:
    found = profile_all.run(TARGETS, tmp_path / "out", OPTIONS, by_torch)
    assert found.tools == [
        "nsys is not in PATH: no timeline",
        "ncu is not in PATH: torch's profiler gives times and estimated occupancy instead",
    ]
    assert found.kernels == {TARGETS[0]: by_torch(TARGETS[0])}
    assert found.refused == {TARGETS[1]: "kernel 'tiled' is for other problems"}
    put(tools, "nsys", "#!/bin/sh\necho no such option\n")
    failed = profile_all.run(TARGETS, tmp_path / "out", OPTIONS, by_torch)
    assert failed.tools[0] == "nsys wrote no timeline: no such option"


def test_counters_that_are_reserved_are_not_asked_for_again(tmp_path: Path, tools: Path) -> None:
    complaint = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    calls = put(tools, "ncu", f"#!/bin/sh\necho x >> CALLS\necho '{complaint}'\necho bye\n")
    found = profile_all.run(TARGETS, tmp_path / "out", OPTIONS, by_torch)
    assert found.tools[1].startswith("ncu may not read counters here (ERR_NVGPUCTRPERM): torch's profiler")
    assert calls.read_text() == "x\n" and list(found.kernels) == TARGETS[:1]


def test_the_report_shows_occupancy(tmp_path: Path, tools: Path) -> None:
    put(tools, "ncu", NCU)
    found = profile_all.run(TARGETS, tmp_path, OPTIONS, by_torch)
    environment = {"device": "cuda", "gpu": "Example GPU"}
    (tmp_path / profile_all.RECORD).write_text(found.record(environment))
    write(tmp_path / "ladder.jsonl", [row("mma", 1.0)])
    page = report.page(records.read_all([tmp_path]))
    assert "What the counters say" in page and "<th>occupancy, %</th>" in page and "<td>12.5</td>" in page
    assert "batch 1, 2 heads, 64 tokens, head dim 64; f32 forward" in page
    assert "<code>mma::forward_kernel</code>" in page
    alone = records.read(tmp_path / profile_all.RECORD)
    assert not alone.rows and len(alone.profiles) == 1
    assert "What the counters say" in report.page([alone])


def test_all_kernels_are_profiled_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["profile", "--all", "--shape", "hq=1 sq=16 d=8", "--dtype", "f32", "--device", "cpu"]
    assert cli.main([*arguments, "--pass", "forward", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "ncu and nsys need a GPU" in printed
    assert "with simd: " in printed and "with torch math: " in printed
    (text,) = tmp_path.glob("*/profile.txt")
    assert text.read_text() in printed
    (record,) = tmp_path.glob("*/profile.jsonl")
    (line,) = record.read_text().splitlines()
    assert json.loads(line)["environment"]["command"].startswith("tilewise profile --all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all"], "--all: expected --out as well, got none"),
        (["--out", "x", "--tool", "ncu"], "--tool: expected none with --out"),
        (["--kernel", "none"], "--kernel: expected one of "),
    ],
)
def test_wrong_options_of_profile(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_nsys_watches_has_the_same_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that the options make, read by the parser again, on the device that is here."""
    seen: list[str] = []
    monkeypatch.setattr(
        profile_all, "watch", lambda targets, _: seen.extend(str(Target(x.name, p)) for x, p in targets)
    )
    words = profile_all.program(["--shape", "hq=1 sq=16 d=8", "--causal", "yes", "--dtype", "bf16"])[3:]
    assert cli.main([*words, "--device", "cpu"]) == 0
    assert seen[0] == "reference, h1 s16 d8 causal bf16 forward"
    assert "simd, h1 s16 d8 causal bf16 backward" in seen and not any("flex" in name for name in seen)


# What a profiler on a GPU watches, by stand-ins for torch.cuda


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in order: calls of the kernel, and what the profiler is told."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: found.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: found.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: found.append(name) or nullcontext())
    return found


def telling(events: list[str], name: str) -> Implementation:
    def bind(problem: Problem, given: Any) -> Callable[[], Any]:
        if name == "refuses":
            raise CannotTake("is for other problems")
        return lambda: events.append(name) or given.inputs[0]

    return Implementation(name, True, bind)


def test_a_profiler_sees_one_warm_call(events: list[str]) -> None:
    profile.watched(telling(events, "call"), SMALL, torch.device("cpu"))
    assert events == ["call", "call", "start", "call", "stop"]


def test_a_timeline_sees_each_kernel_in_its_range(
    events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["first", "refuses", "second"]
    profile_all.watch([(telling(events, name), SMALL) for name in names], torch.device("cpu"))
    problem = "h2 s64 d64 f32 forward"
    ranges = [f"first, {problem}", "first", f"second, {problem}", "second"]
    assert events == ["first"] * 2 + ["second"] * 2 + ["start", *ranges, "stop"]
    assert capsys.readouterr().err == f"refuses, {problem}: is for other problems\n"


def test_the_best_tool_that_works_is_taken(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ncu, then nsys, then torch's profiler; the one asked for, or none."""
    cuda = torch.device("cuda")
    kernel = telling([], "mma")
    monkeypatch.setattr(profile, "by_torch", lambda *given: "of torch")
    with pytest.raises(BadInput, match="--tool: expected an installed program, got nsys"):
        profile.run(kernel, SMALL, cuda, "nsys")
    assert profile.run(kernel, SMALL, cuda, None) == (
        "Neither ncu nor nsys is installed; torch's profiler gives:\nof torch"
    )
    put(tools, "ncu", "#!/bin/sh\necho '==ERROR== no counters'\n")
    assert profile.run(kernel, SMALL, cuda, None).splitlines()[-1] == "of torch"
    with pytest.raises(RuntimeError, match="no counters"):
        profile.run(kernel, SMALL, cuda, "ncu")
    put(tools, "nsys", "#!/bin/sh\nprintf 'Time (%%),Avg (ns),Name\\n100.0,1500.0,mma\\n'\n")
    assert profile.run(kernel, SMALL, cuda, None).split() == ["100.0", "%", "1.5", "us", "mma"]
    of_ncu = '"ID","Kernel Name","gpu__time_duration.sum"\\n"","","ns"\\n"0","of ncu","1"\\n'
    put(tools, "ncu", f"#!/bin/sh\nprintf '{of_ncu}'\n")
    assert profile.run(kernel, SMALL, cuda, None).startswith("of ncu\n")


def test_kernels_are_found_in_torchs_trace(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler's own trace, to which a kernel is added: this machine launches none."""
    export = torch.profiler.profile.export_chrome_trace

    def with_kernel(self: Any, path: str) -> None:
        export(self, path)
        trace = json.loads(Path(path).read_text())
        trace["traceEvents"].append(
            {
                "cat": "kernel",
                "name": "mma",
                "dur": 2.5,
                "ts": 1,
                "args": {"grid": [2, 1, 1], "block": [64, 1, 1]},
            }
        )
        Path(path).write_text(json.dumps(trace))

    kernel = telling(events, "call")
    assert profile.by_torch(kernel, SMALL, torch.device("cpu")) == "torch's profiler saw no kernel."
    assert events == ["call"] * 3
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", with_kernel)
    assert "mma" in profile.by_torch(kernel, SMALL, torch.device("cpu"))
