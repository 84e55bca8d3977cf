"""`tilewise profile`: one implementation on one problem under ncu or nsys, or torch's own profiler.

ncu gives the counters that say what bounds a kernel, nsys the time of each kernel. Where neither is there,
torch's profiler gives times and the static figures (registers, shared memory, occupancy), and on a CPU the
rate is compared with measured ones.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise.bench import kinds, measure, rates
from tilewise.bench.implementations import Implementation, call_of
from tilewise.bench.kinds import AnyProblem
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Record
from tilewise.bench.table import digits, rate, share

STALLS = {
    "long_scoreboard": "for memory (L2 or beyond)",
    "short_scoreboard": "for shared memory",
    "barrier": "at barriers",
    "math_pipe_throttle": "for an arithmetic pipe",
    "mio_throttle": "to issue shared-memory instructions",
    "wait": "for a fixed latency",
    "not_selected": "while another warp was chosen",
}
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor pipe, instructions",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": "FMA pipe",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 and shared memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "bank conflicts",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "accesses of shared memory",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "exponentials' pipe",
    "sm__inst_executed_pipe_tensor.sum": "tensor instructions",
    "smsp__inst_executed.sum": "instructions",
    "launch__registers_per_thread": "registers a thread",
    "launch__shared_mem_per_block": "shared memory a block",
    **{_STALL.format(stall): f"stalled {words}" for stall, words in STALLS.items()},
}
_PIPES = ("tensor pipe", "tensor pipe, instructions", "FMA pipe", "issue slots", "L1 and shared memory", "L2",
          "device memory")  # fmt: skip


def command(problem: AnyProblem, kernel: str) -> list[str]:
    """This program again, as what a profiler watches."""
    return [
        *(sys.executable, "-m", "tilewise", "profile", "--watched", "--kernel", kernel),
        *("--shape", problem.shape_option, "--dtype", problem.dtype, "--pass", problem.direction),
        *("--causal", "yes" if getattr(problem, "causal", False) else "no"),
    ]


def warmed(implementation: Implementation, problem: AnyProblem, device: torch.device) -> Callable[[], object]:
    """The call that is looked at, after two that are not."""
    torch.manual_seed(0)
    call = call_of(implementation, problem, kinds.inputs(problem, device))
    call()
    call()
    torch.cuda.synchronize()
    return call


def watched(implementation: Implementation, problem: AnyProblem, device: torch.device) -> None:
    """One warm call while the profiler is told to look. A range of NVTX would be this thread's alone, and
    autograd launches the kernels of backward from another.
    """
    with implementation.around(problem):
        call = warmed(implementation, problem, device)
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def run(implementation: Implementation, problem: AnyProblem, device: torch.device, tool: str | None) -> str:
    """What the best tool present (or the one asked for) finds."""
    if tool in ("ncu", "nsys") and not shutil.which(tool):
        raise BadInput(f"--tool: expected an installed program, got {tool}, which is not in PATH")
    if device.type == "cpu":
        return on_cpu(implementation, problem, device)
    problems = []
    for name, profiler in (("ncu", by_ncu), ("nsys", by_nsys)):
        if tool in (None, name) and shutil.which(name):
            try:
                return profiler(command(problem, implementation.name))
            except RuntimeError as error:
                if tool:
                    raise
                problems.append(f"{name}: {error}")
    missing = "" if problems else "Neither ncu nor nsys is installed; torch's profiler gives:\n"
    return "\n".join([*problems, missing + by_torch(implementation, problem, device)])


# ncu


def by_ncu(program: list[str]) -> str:
    return "\n\n".join(ncu_text(name, figures) for name, figures in ncu_kernels(program))


NCU_TABLE = ("--csv", "--page", "raw", "--print-units", "base")


def ncu_kernels(program: list[str], *options: str) -> list[tuple[str, dict[str, float]]]:
    """Kernels that a program launches while it is watched, and their figures."""
    said = _ncu([*NCU_TABLE, *options], program, lambda said: bool(parse_ncu(said)))
    kernels = parse_ncu(said)
    if not kernels:
        raise RuntimeError(_ncu_complaint(said))
    return kernels


def ncu_report(program: list[str], *options: str) -> None:
    """Lets ncu write a report, which `--export` in `options` names."""
    path = Path(options[options.index("--export") + 1])
    said = _ncu(options, program, lambda _: path.exists())
    if not path.exists():
        raise RuntimeError(_ncu_complaint(said))


def _ncu(options: Sequence[str], program: list[str], done: Callable[[str], bool]) -> str:
    """What ncu says. It complains of metrics that this GPU has not, and looks at nothing then: without them
    it is asked again.
    """
    said = _ncu_once(list(METRICS), options, program)
    if not done(said) and any(metric in said for metric in METRICS):
        said = _ncu_once([metric for metric in METRICS if metric not in said], options, program)
    return said


def _ncu_once(metrics: Sequence[str], options: Sequence[str], program: list[str]) -> str:
    asked = ["ncu", "--profile-from-start", "off", "--metrics", ",".join(metrics), *options]
    done = subprocess.run([*asked, *program], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _ncu_complaint(said: str) -> str:
    """The line that has its error; a program's own words may come after it."""
    errors = [line.strip() for line in said.splitlines() if line.startswith("==ERROR==")]
    return errors[0].removeprefix("==ERROR==").strip() if errors else last_line(said)


def parse_ncu(output: str) -> list[tuple[str, dict[str, float]]]:
    """Kernels and their figures under our names, of ncu's raw page as CSV."""
    start = output.find('"ID"')
    if start < 0:
        return []
    rows = list(csv.DictReader(io.StringIO(output[start:])))
    units = rows[0] if rows and not rows[0].get("ID") else {}
    kernels = []
    for row in rows:
        if not (row.get("ID") or "").isdigit():
            continue  # the units, and what ncu or the program said after the table
        figures = {}
        for metric, name in METRICS.items():
            try:
                value = float((row.get(metric) or "").replace(",", ""))
            except ValueError:
                continue  # n/a on this GPU
            factor = {"nsecond": 1e-3, "ns": 1e-3, "msecond": 1e3, "ms": 1e3, "Kbyte/block": 1e3}
            figures[name] = value * factor.get(units.get(metric, ""), 1.0)
        kernels.append((row.get("Kernel Name", "kernel"), figures))
    return kernels


def kernel_name(declared: str) -> str:
    """A kernel's own name, without types and arguments.

    >>> kernel_name("void mma::forward_kernel<__nv_bfloat16, mma::Plain, 0>(tilewise::AttentionCall, Parts)")
    'mma::forward_kernel'
    >>> kernel_name("copy")
    'copy'
    """
    name = declared.partition("<")[0].partition("(")[0].split()
    return name[-1] if name else declared


def ncu_text(name: str, figures: dict[str, float]) -> str:
    lines = [name[:110]]
    if "time" in figures:
        lines.append(f"  {'time':24}{figures['time']:>10.1f} us")
    lines += [f"  {pipe:24}{figures[pipe]:>10.1f} % busy" for pipe in _PIPES if pipe in figures]
    if "occupancy" in figures:
        lines.append(f"  {'occupancy':24}{figures['occupancy']:>10.1f} %")
    for key in ("registers a thread", "shared memory a block", "bank conflicts"):
        if key in figures:
            lines.append(f"  {key:24}{figures[key]:>10.0f}")
    stalls = sorted(((v, k) for k, v in figures.items() if k.startswith("stalled")), reverse=True)[:3]
    lines += [f"  {words:52}{value:>6.2f} warps an issue" for value, words in stalls]
    return "\n".join([*lines, bottleneck(figures)])


def bottleneck(figures: dict[str, float]) -> str:
    """One sentence.

    >>> bottleneck({"FMA pipe": 85.0, "device memory": 12.0})
    'Bound by the FMA pipe, 85 % busy.'
    >>> bottleneck({"FMA pipe": 25.0, "device memory": 12.0, "stalled at barriers": 2.0})
    'No part is busy more than 25 % of the time (FMA pipe); most waiting warps are stalled at barriers.'
    """
    busy = {pipe: figures[pipe] for pipe in _PIPES if pipe in figures}
    if not busy:
        return "No counter shows what bounds it."
    pipe, most = max(busy.items(), key=lambda item: item[1])
    if most >= 60:
        return f"Bound by the {pipe}, {most:.0f} % busy."
    stalls = {k: v for k, v in figures.items() if k.startswith("stalled") and "another" not in k}
    reason = f"; most waiting warps are {max(stalls, key=lambda k: stalls[k])}" if stalls else ""
    return f"No part is busy more than {most:.0f} % of the time ({pipe}){reason}."


# nsys


def by_nsys(program: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "profile"
        asked = ["nsys", "profile", "--trace=cuda,nvtx", "--capture-range=cudaProfilerApi"]
        made = subprocess.run(
            [*asked, "--output", str(report), *program], capture_output=True, text=True, check=False
        )
        table = ["nsys", "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", f"{report}.nsys-rep"]
        done = subprocess.run(table, capture_output=True, text=True, check=False)
    start = done.stdout.find("Time (%)")
    if start < 0:
        raise RuntimeError(last_line(made.stdout + made.stderr + done.stdout + done.stderr))
    rows = list(csv.DictReader(io.StringIO(done.stdout[start:])))
    return "\n".join(
        f"{row['Time (%)']:>6} %  {float(row['Avg (ns)']) / 1e3:10.1f} us  {row['Name']}" for row in rows
    )


# torch's profiler


def by_torch(implementation: Implementation, problem: AnyProblem, device: torch.device) -> str:
    kernels = torch_kernels(implementation, problem, device)
    return kernel_table(kernels) if kernels else "torch's profiler saw no kernel."


def torch_figures(kernel: dict[str, Any]) -> dict[str, float]:
    """What torch's profiler knows of a kernel, under the names that ncu's figures have.

    >>> torch_figures({"dur": 2.5, "args": {"est. achieved occupancy %": 25, "registers per thread": 96}})
    {'time': 2.5, 'occupancy': 25.0, 'registers a thread': 96.0}
    """
    launch = kernel.get("args", {})
    names = {
        "est. achieved occupancy %": "occupancy",
        "registers per thread": "registers a thread",
        "shared memory": "shared memory a block",
    }
    known = {name: float(launch[key]) for key, name in names.items() if launch.get(key) is not None}
    return {"time": float(kernel["dur"]), **known}


def torch_kernels(
    implementation: Implementation, problem: AnyProblem, device: torch.device
) -> list[dict[str, Any]]:
    """The kernels that torch's profiler sees in a call, in order."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with implementation.around(problem):
        call = warmed(implementation, problem, device)
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return parse_trace(json.loads(path.read_text()))


def parse_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels in order, each with torch's figures of its launch."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return sorted(found, key=lambda event: event["ts"])


def kernel_table(kernels: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'us':>10}{'blocks':>9}{'threads':>9}{'registers':>11}{'shared KiB':>12}{'occupancy':>11}  kernel"
    ]
    for kernel in kernels:
        launch = kernel.get("args", {})
        blocks, threads = (_product(launch.get(key, ())) for key in ("grid", "block"))
        lines.append(
            f"{kernel['dur']:>10.1f}{blocks:>9}{threads:>9}{launch.get('registers per thread', '–'):>11}"
            f"{launch.get('shared memory', 0) / 1024:>12.1f}"
            f"{launch.get('est. achieved occupancy %', '–'):>10}%  {kernel['name'][:100]}"
        )
    return "\n".join(lines)


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


# CPU


def on_cpu(implementation: Implementation, problem: AnyProblem, device: torch.device) -> str:
    """The rate beside measured ones: no counters, but which side of the roof it is under."""
    settings = measure.Settings(device, limit_ms=60_000)
    measured = Record(rates=rates.measure(device, {problem.dtype}))
    (line,) = measure.measure(problem, [implementation], settings, measured)
    if line.get("ms") is None:
        raise BadInput(f"--kernel: {implementation.name} cannot: {line['skipped']}")
    compute, copy = line["peak_tflops"], measured.copy_rate or 0.0
    words = (
        f"{problem} with {implementation.name}: {digits(line['ms'])} ms, {rate(line['tflops'])}, "
        f"{digits(line['gbps'])} GB/s, {digits(line['peak_mb'])} MB\n"
        f"intensity {digits(problem.intensity)} FLOP per byte; copy {digits(copy)} GB/s"
    )
    if not compute:
        return words + "."
    words += f", matrix product {rate(compute)}\n"
    if problem.intensity * copy * 1e-3 < compute:
        return words + f"Bound by memory: {share(line['percent_of_copy'])} a copy's bytes per second."
    return words + f"Bound by arithmetic: {share(line['percent_of_peak'])} the matrix product's rate."


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
