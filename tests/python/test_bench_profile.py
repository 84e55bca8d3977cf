"""Profiles: what ncu, nsys and torch say, and what bounds a kernel."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tilewise import cli
from tilewise.bench import profile
from tilewise.bench.problem import Problem

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
