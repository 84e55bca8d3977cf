"""Every implementation on one problem: checked, then timed against each other, one line each."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.bench import exact, rates, timing
from tilewise.bench.implementations import Implementation
from tilewise.bench.operands import Operands, input_bytes
from tilewise.bench.problem import Problem
from tilewise.bench.records import FIGURES, Line, Record

Results = tuple[Tensor, ...]


@dataclass
class Settings:
    device: torch.device
    runs: int = 20  # rounds on a GPU
    seconds: float = 0.3  # for each implementation on a CPU
    limit_ms: float = 500.0  # what takes longer is left out
    seen_rates: dict[tuple[str, str, str], float] = field(default_factory=dict)  # TFLOP/s, highest so far

    @property
    def checked_flops(self) -> float:
        """Of the float64 reference: about a second on two cores, less on a GPU."""
        return 1e12 if self.device.type == "cuda" else 4e9


def call_of(implementation: Implementation, problem: Problem, operands: Operands) -> Callable[[], Results]:
    """The pass as a call. Forward records nothing for a backward, and backward finds its forward done."""
    attend = implementation.bind(problem, operands)
    inputs, d_o = operands.inputs, operands.d_o

    def forward() -> Results:
        with torch.no_grad():
            return (attend(),)

    def both() -> Results:
        out = attend()
        return (out.detach(), *torch.autograd.grad(out, inputs, d_o))

    if problem.direction == "forward":
        return forward
    if problem.direction == "both":
        return both
    with implementation.scope():
        out = attend()
    return lambda: torch.autograd.grad(out, inputs, d_o, retain_graph=True)


def measure(
    problem: Problem, implementations: Sequence[Implementation], settings: Settings, ceilings: Record
) -> list[Line]:
    """A line for each implementation: figures, or why there are none."""
    device = settings.device
    lines = {
        implementation.name: {
            **problem.line(),
            "impl": implementation.name,
            "device": device.type,
            **dict.fromkeys(FIGURES),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
        }
        for implementation in implementations
    }
    entrants: dict[str, timing.Entrant] = {}
    try:
        torch.manual_seed(0)
        sets = [Operands.random(problem, device)]
        if device.type == "cuda":
            more = timing.sets_past_cache(input_bytes(problem)) - 1
            sets += [Operands.random(problem, device) for _ in range(more)]
        check = _Check(problem, sets[0], settings.checked_flops)
    except Exception as error:
        return [line | {"skipped": reason_of(error)} for line in lines.values()]
    for implementation in implementations:
        line = lines[implementation.name]
        try:
            entrants[implementation.name] = _enter(implementation, problem, sets, check, settings, line)
        except Exception as error:  # also torch's out of memory
            line |= dict.fromkeys(FIGURES) | {"skipped": reason_of(error)}
            gc.collect()  # what a traceback held
            if device.type == "cuda":
                torch.cuda.empty_cache()
    del check
    if device.type == "cpu" and entrants and (gemm := rates.gemm_call(device, problem.dtype)):
        # Others may have the cores now and then: the highest rate so far is the ceiling.
        entrants[rates.GEMM] = timing.Entrant([gemm])
    try:
        timings = timing.race(entrants, device, settings.runs, settings.seconds)
    except Exception as error:
        return [{"skipped": reason_of(error)} | line for line in lines.values()]
    if gemm_time := timings.pop(rates.GEMM, None):
        ceilings.rates.append(rates.gemm_line(device, problem.dtype, gemm_time.best_ms))
    compute, copy = ceilings.compute_ceiling(problem.dtype), ceilings.copy_ceiling
    for name, result in timings.items():
        lines[name] |= derived(problem, result, compute, copy)
        key = (name, problem.dtype, problem.direction)
        settings.seen_rates[key] = max(lines[name]["tflops"], settings.seen_rates.get(key, 0.0))
    return list(lines.values())


class _Check:
    """A result's error, on as many heads as there is time for."""

    def __init__(self, problem: Problem, operands: Operands, flops: float) -> None:
        self.hkv = problem.hkv
        self.groups = exact.groups_within(problem, flops)
        drawn = problem.dropout > 0  # every implementation draws its own
        self.exact = None if drawn else exact.compute(problem, operands, self.groups)

    def __call__(self, results: Results) -> tuple[float | None, float | None]:
        """Largest error, and the largest relative one of the results."""
        if self.exact is None:
            return None, None
        found = exact.errors([exact.of_groups(x, self.groups, self.hkv) for x in results], self.exact)
        if any(math.isnan(error.largest) for error in found):
            raise WrongResult("WRONG: the result has NaN")
        return max(error.largest for error in found), max(error.relative for error in found)


class WrongResult(RuntimeError):
    """A result that nobody should time."""


def _enter(
    implementation: Implementation,
    problem: Problem,
    sets: Sequence[Operands],
    check: _Check,
    settings: Settings,
    line: Line,
) -> timing.Entrant:
    """An entrant that is warm and checked; raises where it cannot take the problem or takes too long."""
    device, limit = settings.device, settings.limit_ms
    rate = settings.seen_rates.get((implementation.name, problem.dtype, problem.direction))
    # Rates rise with the size. So what would be too long at twice the best rate so far is, and is not tried.
    if rate and (least := problem.flops / (2 * rate) * 1e-9) > limit:
        raise TooLong(f"one run would take {least:.0f} ms or more, --limit-ms is {limit:.0f}")
    with implementation.scope():
        calls = [call_of(implementation, problem, sets[0])]
        error, relative = check(calls[0]())
        once = timing.once_ms(calls[0], device)
        if once > limit:
            settings.seen_rates.setdefault(
                (implementation.name, problem.dtype, problem.direction), problem.flops / once * 1e-9
            )
            raise TooLong(f"one run takes {once:.0f} ms, --limit-ms is {limit:.0f}")
        line |= {
            "peak_mb": rounded(timing.peak_bytes(calls[0], device) * 1e-6),
            "error": rounded(error),
            "relative_error": rounded(relative),
        }
        calls += [call_of(implementation, problem, operands) for operands in sets[1:]]
    return timing.Entrant(calls, implementation.scope)


class TooLong(RuntimeError):
    """An implementation whose turn would take too long."""


def derived(
    problem: Problem, result: timing.Timing, compute: float | None, copy: float | None
) -> dict[str, Any]:
    """The figures of a line that follow from the time and the ceilings, in TFLOP/s and GB/s."""
    tflops = problem.flops / result.ms * 1e-9
    gbps = problem.bytes / result.ms * 1e-6
    return {
        "ms": rounded(result.ms),
        "spread": rounded(result.spread),
        "tflops": rounded(tflops),
        "gbps": rounded(gbps),
        "percent_of_peak": rounded(100 * tflops / compute) if compute else None,
        "percent_of_copy": rounded(100 * gbps / copy) if copy else None,
        "peak_tflops": rounded(compute),
        "runs": result.runs,
        "cpu_share": rounded(result.cpu_share),
    }


def rounded(value: float | None) -> float | None:
    """Six digits are more than a measurement has."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def reason_of(error: Exception) -> str:
    """One line."""
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return "out of memory"
    text = " ".join(str(error).split())
    if text.startswith(("No available kernel", "No viable backend")):
        return "PyTorch has no such kernel for this"
    first = text.split(". ")[0] if len(text) > 160 else text
    return first[:160] or type(error).__name__
