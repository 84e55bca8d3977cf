"""Every implementation on one problem: checked, then timed against each other, one line each."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise._arguments import tf32_allowed
from tilewise.bench import exact, kinds, rates, timing
from tilewise.bench.implementations import Implementation, call_of
from tilewise.bench.kinds import AnyProblem, Check
from tilewise.bench.problem import BadInput
from tilewise.bench.records import FIGURES, Line, Record

OUT_OF_MEMORY = "out of memory"
SAYS_A_RATE_MS = 1.0  # of a shorter call latencies are too large a part


@dataclass
class Settings:
    device: torch.device
    runs: int = 20  # rounds on a GPU
    seconds: float = 0.3  # for each implementation on a CPU
    limit_ms: float = 500.0  # what takes longer is left out
    seen_rates: dict[tuple[str, ...], float] = field(default_factory=dict)  # TFLOP/s, highest so far

    @property
    def checked_flops(self) -> float:
        """Of the float64 reference: about a second on two cores, less on a GPU."""
        return 1e12 if self.device.type == "cuda" else 4e9


def measure(
    problem: AnyProblem, implementations: Sequence[Implementation], settings: Settings, machine: Record
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
            **({"tf32": True} if device.type == "cuda" and problem.dtype == "f32" and tf32_allowed() else {}),
        }
        for implementation in implementations
    }
    entrants: dict[str, timing.Entrant] = {}
    try:
        torch.manual_seed(0)
        sets = [kinds.inputs(problem, device)]
        if device.type == "cuda":
            more = timing.sets_past_cache(sets[0].bytes) - 1
            sets += [kinds.inputs(problem, device) for _ in range(more)]
        check = kinds.check(problem, sets[0], settings.checked_flops)
    except Exception as error:
        return [line | {"skipped": reason_of(error)} for line in lines.values()]
    for implementation in implementations:
        line = lines[implementation.name]
        try:
            entrants[implementation.name] = _enter(implementation, problem, sets, check, settings, line)
        except Exception as error:  # also torch's out of memory
            line |= dict.fromkeys(FIGURES) | {"skipped": reason_of(error)}
            _check_device(device, f"{implementation.name} on {problem}")
            if line["skipped"] == OUT_OF_MEMORY:
                gc.collect()  # what a traceback held; a tenth of a second, so not for every reason
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    del check
    if device.type == "cpu" and entrants and (gemm := rates.gemm_call(device, problem.dtype)):
        # Others may have the cores now and then: the highest rate so far counts.
        entrants[rates.GEMM] = timing.Entrant([gemm])
    try:
        timings = timing.race(entrants, device, settings.runs, settings.seconds)
    except Exception as error:
        _check_device(device, str(problem))
        return [{"skipped": reason_of(error)} | line for line in lines.values()]
    if gemm_time := timings.pop(rates.GEMM, None):
        machine.rates.append(rates.gemm_line(device, problem.dtype, gemm_time.best_ms))
    for name, result in timings.items():
        yardstick = machine.yardstick(lines[name])
        compute = yardstick.tflops if yardstick else None
        lines[name] |= derived(problem, result, compute, machine.copy_rate)
        key = (problem.op, name, problem.dtype, problem.direction)
        if result.ms >= SAYS_A_RATE_MS:
            settings.seen_rates[key] = max(lines[name]["tflops"], settings.seen_rates.get(key, 0.0))
    return list(lines.values())


class DeviceLost(RuntimeError):
    """A GPU that refuses everything from here on."""


def _check_device(device: torch.device, who: str) -> None:
    """After an illegal access a process has no GPU any more: what follows would be rows without figures."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(f"{who} left the GPU unusable: {reason_of(error)}") from None


def _worst(errors: Sequence[exact.Error]) -> tuple[float | None, float | None]:
    """The largest error, and the largest relative one, of a pass's results. What is 0 but for rounding, as
    the gradient of a bias of keys is, has none.

    >>> zero = exact.Error(largest=1e-3, mean=0, rms=1e-3, exact_largest=1e-16, exact_rms=1e-16)
    >>> other = exact.Error(largest=1e-2, mean=0, rms=1e-3, exact_largest=2, exact_rms=1)
    >>> _worst([zero, other])
    (0.01, 0.001)
    """
    if any(math.isnan(error.largest) for error in errors):
        raise WrongResult("WRONG: the result has NaN")
    largest = max((error.largest for error in errors), default=None)
    least = 1e-12 * max((error.exact_rms for error in errors), default=0.0)
    return largest, max((error.relative for error in errors if error.exact_rms >= least), default=None)


class WrongResult(RuntimeError):
    """A result that nobody should time."""


def _enter(
    implementation: Implementation,
    problem: AnyProblem,
    sets: Sequence[Any],
    check: Check,
    settings: Settings,
    line: Line,
) -> timing.Entrant:
    """An entrant that is warm and checked; raises where it cannot take the problem or takes too long."""
    device, limit = settings.device, settings.limit_ms
    key = (problem.op, implementation.name, problem.dtype, problem.direction)
    rate = settings.seen_rates.get(key)
    # Rates rise with the size. So what would be too long at twice the best rate so far is, and is not tried.
    if rate and (least := problem.flops / (2 * rate) * 1e-9) > limit:
        raise TooLong(f"one run would take {least:.0f} ms or more, --limit-ms is {limit:.0f}")
    with implementation.around(problem):
        calls = [call_of(implementation, problem, sets[0])]
        error, relative = _worst(check(calls[0]()))
        once = timing.once_ms(calls[0], device)
        if once > limit:  # once may be chance: torch.compile may have compiled again
            once = timing.once_ms(calls[0], device)
        if once > limit:
            settings.seen_rates.setdefault(key, problem.flops / once * 1e-9)
            raise TooLong(f"one run takes {once:.0f} ms, --limit-ms is {limit:.0f}")
        line |= {
            "peak_mb": rounded(timing.peak_bytes(calls[0], device) * 1e-6),
            "error": rounded(error),
            "relative_error": rounded(relative),
        }
        calls += [call_of(implementation, problem, operands) for operands in sets[1:]]
    return timing.Entrant(calls, functools.partial(implementation.around, problem))


class TooLong(RuntimeError):
    """An implementation whose turn would take too long."""


def derived(
    problem: AnyProblem, result: timing.Timing, compute: float | None, copy: float | None
) -> dict[str, Any]:
    """The figures of a line that follow from the time and the measured rates, in TFLOP/s and GB/s."""
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


@contextmanager
def making(problem: AnyProblem) -> Iterator[None]:
    """Tensors that cannot be made are the fault of who asked for such sizes."""
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:
        option = "--shape" if problem.suite == "shape" else f"--suite: {problem.suite}"
        raise BadInput(f"{option}: cannot make the tensors of {problem}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """One line."""
    text = " ".join(str(error).split())
    refused = any(words in text for words in ("not enough memory", "can't allocate memory"))
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or refused:
        return OUT_OF_MEMORY
    if text.startswith(("No available kernel", "No viable backend")):
        return "PyTorch has no such kernel for this problem"
    first = text.split(". ")[0] if len(text) > 160 else text
    return first[:160] or type(error).__name__
