"""Times Tilewise's attention kernels and PyTorch's on this machine's GPU, in one process, and records that.

Suite `ladder`: f32, B4 H8, D64 and D128, both passes, full and causal. In a line, `ms` is the median of
CUDA-event times, `spread` the distance between the quartiles over it, `gbps` counts every tensor once,
`peak_mb` is what a call allocates (results and scratch), `error` the largest against float64 in the first
batch entry, and `percent_of_peak` is of the card's f32 multiply-adds as measured here.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gpu_record
from gpu_record import STAGE, NoGpu, Record

sys.path.insert(0, str(STAGE / "python"))

try:
    import gpu_timing
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    print(f"gpu-bench needs PyTorch in {sys.executable}: {error}")
    sys.exit(2)

OUR_KERNELS = ("naive", "tiled", "fused")
PEERS = {
    "torch math": SDPBackend.MATH,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    direction: str  # forward or backward
    dtype: str
    b: int
    h: int
    s: int
    d: int
    causal: bool

    @property
    def flops(self) -> float:
        forward = 4 * self.b * self.h * self.s**2 * self.d * (0.5 if self.causal else 1)
        return forward if self.direction == "forward" else 2.5 * forward

    @property
    def bytes(self) -> int:
        """q, k, v and o; backward also d_o, dq, dk, dv and lse."""
        rows = self.b * self.h * self.s
        row = self.d * DTYPES[self.dtype].itemsize
        return rows * (4 * row if self.direction == "forward" else 8 * row + 4)

    def line(self, suite: str, impl: str) -> dict[str, Any]:
        return {
            "suite": suite,
            "op": "attention",
            "pass": self.direction,
            "impl": impl,
            "device": "cuda",
            "dtype": self.dtype,
            **{"b": self.b, "hq": self.h, "hkv": self.h, "sq": self.s, "sk": self.s},
            **{"d": self.d, "dv": self.d},
            "causal": self.causal,
            "window": None,
        }


def ladder(options: argparse.Namespace) -> Iterator[Problem]:
    for direction in options.passes:
        for d in options.dims:
            for causal in (False, True):
                for s in options.lengths:
                    yield Problem(direction, "f32", 4, 8, s, d, causal)


# Calls


@dataclass
class Operands:
    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor

    @staticmethod
    def random(problem: Problem) -> Operands:
        shape = (problem.b, problem.h, problem.s, problem.d)
        backward = problem.direction == "backward"
        q, k, v, d_o = (torch.randn(shape, device="cuda").to(DTYPES[problem.dtype]) for _ in range(4))
        return Operands(*(x.requires_grad_(backward) for x in (q, k, v)), d_o)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def attend_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attend_tilewise(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    import tilewise

    return tilewise.attention(q, k, v, is_causal=causal, kernel=kernel)


def implementations() -> dict[str, Attend]:
    import tilewise

    ours = [name for name in OUR_KERNELS if name in tilewise.kernels()]
    return {name: partial(attend_tilewise, name) for name in ours} | {
        name: partial(attend_torch, backend) for name, backend in PEERS.items()
    }


def call_of(attend: Attend, problem: Problem, operands: Operands) -> gpu_timing.Call:
    """The pass as a call: forward records nothing for a backward, and backward finds its forward done."""
    if problem.direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*operands.inputs, problem.causal)

        return forward
    out = attend(*operands.inputs, problem.causal)
    return partial(torch.autograd.grad, out, operands.inputs, operands.d_o, retain_graph=True)


def exact(problem: Problem, operands: Operands) -> tuple[Tensor, ...]:
    """The first batch entry's results in float64."""
    q, k, v = (x[:1].detach().double().requires_grad_(x.requires_grad) for x in operands.inputs)
    score = q @ k.mT / problem.d**0.5
    if problem.causal:
        hidden = torch.ones(problem.s, problem.s, dtype=torch.bool, device=q.device).triu(1)
        score = score.masked_fill(hidden, -torch.inf)
    out = score.softmax(-1) @ v
    if problem.direction == "forward":
        return (out,)
    return torch.autograd.grad(out, (q, k, v), operands.d_o[:1].double())


def error_of(result: Tensor | tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    results = (result,) if isinstance(result, Tensor) else result
    errors = [(x[:1].double() - y).abs().max() for x, y in zip(results, expected, strict=True)]
    return torch.stack(errors).max().item()  # a NaN stays


# Measuring


@dataclass
class Entrant:
    calls: list[gpu_timing.Call]
    peak_mb: float
    error: float


def enter(
    attend: Attend, problem: Problem, sets: list[Operands], expected: tuple[Tensor, ...], limit_ms: float
) -> Entrant:
    """An entrant that is warm and checked; raises where it cannot take the problem or takes too long."""
    calls = [call_of(attend, problem, sets[0])]
    error = error_of(calls[0](), expected)
    if math.isnan(error):
        raise RuntimeError("WRONG: the result has NaN")
    once = gpu_timing.time_once(calls[0])
    if once > limit_ms:
        raise RuntimeError(f"one run takes {once:.0f} ms, more than --limit-ms {limit_ms:.0f}")
    peak_mb = gpu_timing.peak_bytes(calls[0]) * 1e-6
    calls += [call_of(attend, problem, operands) for operands in sets[1:]]
    return Entrant(calls, peak_mb, error)


def measure(
    problem: Problem, suite: str, options: argparse.Namespace, peak: float, clock_mhz: float
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    inputs_bytes = 3 * problem.b * problem.h * problem.s * problem.d * DTYPES[problem.dtype].itemsize
    sets = [Operands.random(problem) for _ in range(gpu_timing.sets_past_cache(inputs_bytes))]
    expected = exact(problem, sets[0])
    entrants: dict[str, Entrant] = {}
    skipped: dict[str, str] = {}
    for name, attend in implementations().items():
        if options.only and not any(part in name for part in options.only):
            continue
        try:
            entrants[name] = enter(attend, problem, sets, expected, options.limit_ms)
        except RuntimeError as reason:  # torch's out of memory and tilewise's errors among them
            skipped[name] = str(reason).strip().split("\n")[0]
    del expected
    race = gpu_timing.Race({name: entrant.calls for name, entrant in entrants.items()}, clock_mhz)
    lines = []
    for name, timing in race.run(options.runs).items() if entrants else ():
        tflops = problem.flops / timing.ms * 1e-9
        figures = {
            "ms": timing.ms,
            "spread": timing.spread,
            "tflops": tflops,
            "gbps": problem.bytes / timing.ms * 1e-6,
            "peak_mb": entrants[name].peak_mb,
            "error": entrants[name].error,
            "percent_of_peak": 100 * tflops / peak,
        }
        rounded = {key: float(f"{value:.6g}") for key, value in figures.items()}
        lines.append(problem.line(suite, name) | rounded | {"runs": timing.runs})
    nothing = dict.fromkeys(("ms", "spread", "tflops", "gbps", "peak_mb", "error"))
    lines += [problem.line(suite, name) | nothing | {"skipped": reason} for name, reason in skipped.items()]
    return lines


def measure_card(suite: str, gpu: gpu_record.Gpu, record: Record) -> float:
    """The card's own rates, as lines; returns the f32 multiply-add rate that figures are compared with."""
    specified = gpu.multiprocessors * 128 * 2 * gpu.clock_mhz * 1e-6
    rates = {
        "multiply-adds": gpu_timing.fma_tflops(gpu.multiprocessors),
        "torch matmul, no TF32": gpu_timing.matmul_tflops(),
        f"{gpu.multiprocessors} multiprocessors x 128 lanes at {gpu.clock_mhz:.0f} MHz": specified,
    }
    for name, tflops in rates.items():
        line = {"suite": suite, "op": "rate", "impl": name, "device": "cuda", "dtype": "f32"}
        record.add(line | {"tflops": tflops and float(f"{tflops:.6g}")})
        print(f"f32, {name}: " + (f"{tflops:.1f} TFLOP/s" if tflops else "not measured"))
    return max(rate for name, rate in rates.items() if rate and "lanes" not in name)


# Showing

HEADER = f"{'pass':9}{'D':>4} {'mask':7}{'S':>5}  {'impl':17}{'ms':>9}{'TFLOP/s':>9}{'% FMA':>7}"
HEADER += f"{'GB/s':>7}{'spread':>8}{'MB':>9}{'error':>9}"


def row(line: dict[str, Any]) -> str:
    mask = "causal" if line["causal"] else "full"
    text = f"{line['pass']:9}{line['d']:>4} {mask:7}{line['sq']:>5}  {line['impl']:17}"
    if "skipped" in line:
        return f"{text}  {line['skipped'][:90]}"
    return text + (
        f"{line['ms']:>9.4f}{line['tflops']:>9.2f}{line['percent_of_peak']:>7.1f}{line['gbps']:>7.0f}"
        f"{line['spread']:>8.1%}{line['peak_mb']:>9.1f}{line['error']:>9.1e}"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-bench", description=__doc__)
    parser.add_argument("--suite", choices=["ladder"], default="ladder")
    parser.add_argument("--out", type=Path, default=Path("results"), help="record: <out>/<gpu>/<suite>.jsonl")
    parser.add_argument("--lengths", type=numbers, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--passes", type=lambda text: text.split(","), default=["forward", "backward"])
    parser.add_argument("--runs", type=int, default=30, help="timed runs of each implementation")
    parser.add_argument("--limit-ms", type=float, default=1000, help="leaves out what takes longer than this")
    parser.add_argument("--only", action="append", help="only implementations whose name contains this")
    options = parser.parse_args()
    if options.runs < 20:
        parser.error("a median of fewer than 20 runs is no record")
    return options


def main() -> int:
    options = parse_options()
    gpu_record.check_stage()
    try:
        gpu = gpu_record.find_gpu()
        if not torch.cuda.is_available():
            raise NoGpu("this PyTorch cannot use it")
    except NoGpu as reason:
        print(f"gpu-bench needs a GPU: {reason}")
        return 2
    try:
        import tilewise  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"gpu-bench needs the tilewise package in the staged tree: {error}")
        return 2

    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.simplefilter("ignore")  # torch's reasons against a backend, for each problem again
    record = Record(options.out / gpu.slug / f"{options.suite}.jsonl", gpu)
    print(f"{gpu.name}, driver {gpu.driver}, torch {torch.__version__}")
    peak = measure_card(options.suite, gpu, record)
    print(f"\n{HEADER}")
    told = set()
    for problem in ladder(options):
        for line in measure(problem, options.suite, options, peak, gpu.clock_mhz):
            record.add(line)
            if (reason := (line["impl"], line.get("skipped"))) in told:
                continue
            if reason[1]:
                told.add(reason)
            print(row(line), flush=True)
        torch.cuda.empty_cache()
    print(f"\nrecord in {record.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
