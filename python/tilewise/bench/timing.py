"""Times calls against each other: in rounds, each once in turn, in an order that rotates.

On a GPU by CUDA events, on inputs that the others have driven out of the L2. On a CPU by the clock, calls too
short for it several at once.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Call = Callable[[], object]
WARM_UP_ROUNDS = 2
LEAST_RUNS = 20  # of a GPU's medians
SLOW_MS = 30.0  # what takes longer on a GPU is steady, and has
SLOW_RUNS = 3
MOST_SETS = 64  # of inputs
LEAST_HEAD_START_MS, LONGEST_HEAD_START_MS = 1.0, 100.0
HEAD_START_OVER_HOST = 1.5  # of the time that the host needs for a round
LEAST_CPU_ROUNDS = 5
MOST_CPU_ROUNDS = 2000
LEAST_SAMPLE_SECONDS = 5e-4  # shorter calls are timed several at once


@dataclass(frozen=True)
class Timing:
    ms: float  # median
    spread: float  # between the quartiles, over the median
    runs: int
    best_ms: float = 0.0
    cpu_share: float | None = None  # of the time, what the calling thread had a core for; of a CPU alone


@dataclass
class Entrant:
    calls: Sequence[Call]  # the same on every set of inputs
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered outside of the time
    times: list[float] = field(default_factory=list)  # milliseconds
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


def summary(times: Sequence[float]) -> Timing:
    """Median and spread.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    Timing(ms=3.0, spread=0.6666666666666666, runs=5, best_ms=1.0, cpu_share=None)
    """
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, spread=(high - low) / median, runs=len(times), best_ms=min(times))


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Whether products of f32 may be TF32, for torch's products and ours."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if tf32 != (before == "tf32"):
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before


def race(entrants: dict[str, Entrant], device: torch.device, runs: int, seconds: float) -> dict[str, Timing]:
    """Times of all: `runs` rounds on a GPU, rounds until each had its `seconds` on a CPU."""
    if not entrants:
        return {}
    if device.type == "cuda":
        CudaRounds(entrants).run(runs)
    else:
        _cpu_rounds(entrants, seconds)
    found = {name: summary(entrant.times) for name, entrant in entrants.items()}
    if device.type == "cpu":
        for name, entrant in entrants.items():
            found[name] = replace(found[name], cpu_share=entrant.cpu_seconds / entrant.wall_seconds)
    return found


def rotated(names: Sequence[str], number: int) -> list[str]:
    first = number % len(names)
    return [*names[first:], *names[:first]]


# CPU


def _cpu_rounds(entrants: dict[str, Entrant], seconds: float) -> None:
    calls = {name: _calls_a_sample(entrant) for name, entrant in entrants.items()}
    for number in range(MOST_CPU_ROUNDS):
        for name in rotated(list(entrants), number):
            entrant = entrants[name]
            if entrant.wall_seconds >= seconds and len(entrant.times) >= LEAST_CPU_ROUNDS:
                continue
            cpu = time.thread_time()
            elapsed = _seconds(entrant, calls[name])
            entrant.cpu_seconds += time.thread_time() - cpu
            entrant.wall_seconds += elapsed
            entrant.times.append(1e3 * elapsed / calls[name])
        spent = min(entrant.wall_seconds for entrant in entrants.values())
        if spent >= seconds and number + 1 >= LEAST_CPU_ROUNDS:
            return


def _calls_a_sample(entrant: Entrant) -> int:
    shortest = min(_seconds(entrant, 1) for _ in range(2))
    return max(1, min(1000, math.ceil(LEAST_SAMPLE_SECONDS / max(shortest, 1e-9))))


def _seconds(entrant: Entrant, calls: int) -> float:
    call = entrant.calls[0]
    with entrant.scope():
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start


# GPU


def sets_past_cache(bytes_of_a_set: int) -> int:
    """How many sets of inputs to rotate, so that the next has been driven out of the L2 by the others.

    Of small inputs there are only so many: they stay in the L2.
    """
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_SETS, math.ceil(2 * cache / bytes_of_a_set) + 1))


def has_enough(times: Sequence[float]) -> bool:
    """Whether a GPU's entrant is too slow for another run.

    >>> has_enough([31.0, 32.0]), has_enough([31.0, 32.0, 31.5]), has_enough([0.1, 0.1, 0.1])
    (False, True, False)
    """
    return len(times) >= SLOW_RUNS and statistics.median(times) > SLOW_MS


@dataclass(frozen=True)
class _Attempt:
    times: dict[str, float]  # milliseconds
    host_ms: float  # to issue the round
    in_time: bool  # issued before the head start was over


class CudaRounds:
    """Before a round the GPU is kept busy for as long as it takes to issue the round. So the events stand
    around the kernels alone, and the time in which Python prepares a call is in nobody's figure.

    How long that is, the rounds to warm up tell; a round that was issued too late nevertheless is repeated.
    """

    def __init__(self, entrants: dict[str, Entrant]) -> None:
        self.entrants = entrants
        self.cycles_per_ms = _cycles_per_ms()
        self.head_start_ms = LEAST_HEAD_START_MS
        self.calls = 0

    def run(self, rounds: int) -> None:
        self._warm_up()
        for number in range(WARM_UP_ROUNDS, WARM_UP_ROUNDS + rounds):
            names = [name for name, entrant in self.entrants.items() if not has_enough(entrant.times)]
            if not names:
                return
            for name, ms in self._round(rotated(names, number)).items():
                self.entrants[name].times.append(ms)

    def _warm_up(self) -> None:
        names = list(self.entrants)
        rounds = [self._attempt(rotated(names, number)) for number in range(WARM_UP_ROUNDS)]
        host_ms = min(one.host_ms for one in rounds)  # the first one also loads what it runs
        self._give(HEAD_START_OVER_HOST * host_ms)

    def _round(self, names: Sequence[str]) -> dict[str, float]:
        while True:
            found = self._attempt(names)
            if found.in_time or self.head_start_ms >= LONGEST_HEAD_START_MS:
                return found.times
            # A round that takes longer than any head start is not worth a search for the least.
            slow = sum(found.times.values()) > LONGEST_HEAD_START_MS
            self._give(LONGEST_HEAD_START_MS if slow else 2 * self.head_start_ms)

    def _give(self, ms: float) -> None:
        self.head_start_ms = min(max(ms, LEAST_HEAD_START_MS), LONGEST_HEAD_START_MS)

    def _attempt(self, names: Sequence[str]) -> _Attempt:
        torch.cuda.synchronize()
        torch.cuda._sleep(int(self.head_start_ms * self.cycles_per_ms))
        head_start = torch.cuda.Event()
        head_start.record()
        begin = time.perf_counter()
        events = {name: self._issue(name) for name in names}
        host_ms = 1e3 * (time.perf_counter() - begin)
        in_time = not head_start.query()
        torch.cuda.synchronize()
        times = {name: start.elapsed_time(end) for name, (start, end) in events.items()}
        return _Attempt(times, host_ms, in_time)

    def _issue(self, name: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        entrant = self.entrants[name]
        call = entrant.calls[self.calls % len(entrant.calls)]
        self.calls += 1
        with entrant.scope():
            start.record()
            call()
            end.record()
        return start, end


def _cycles_per_ms() -> float:
    cycles = 2_000_000
    torch.cuda._sleep(cycles)  # the clock may have been low
    return cycles / once_ms(lambda: torch.cuda._sleep(cycles), torch.device("cuda"))


def once_ms(call: Call, device: torch.device) -> float:
    """One run, in milliseconds."""
    if device.type == "cpu":
        start_time = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start_time)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


# Memory


def peak_bytes(call: Call, device: torch.device) -> int:
    """What a call allocates from torch at its highest, results included."""
    if device.type == "cpu":
        return _cpu_peak_bytes(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def _cpu_peak_bytes(call: Call) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce every profile
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    del result
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
