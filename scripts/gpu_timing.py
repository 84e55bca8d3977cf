"""Times calls on the GPU against each other: interleaved, by CUDA events, on inputs outside the cache."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
WARM_UP_ROUNDS = 3
LONGEST_HEAD_START_MS = 100.0


@dataclass
class Timing:
    ms: float  # median
    spread: float  # between the quartiles, over the median
    runs: int


def sets_past_cache(bytes_of_a_set: int) -> int:
    """How many sets of inputs to rotate, so that the next has been driven out of the L2 by the others."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, math.ceil(2 * cache / bytes_of_a_set) + 1)


def time_once(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def peak_bytes(call: Call) -> int:
    """What a call allocates at its highest, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


class Race:
    """Rounds in which every entrant runs once, in an order that rotates, each on the next set of inputs.

    Before a round the GPU is kept busy for as long as it takes to issue the round. So the events stand around
    the kernels alone, and the time in which Python prepares a call is in nobody's figure.
    """

    def __init__(self, entrants: dict[str, Sequence[Call]], clock_mhz: float) -> None:
        self.entrants = entrants  # for each its call on every set of inputs
        self.cycles_per_ms = clock_mhz * 1000
        self.head_start_ms = 1.0
        self.calls = 0

    def run(self, rounds: int) -> dict[str, Timing]:
        times: dict[str, list[float]] = {name: [] for name in self.entrants}
        for number in range(WARM_UP_ROUNDS + rounds):
            for name, ms in self._round(number).items():
                if number >= WARM_UP_ROUNDS:
                    times[name].append(ms)
        return {name: summary(of_name) for name, of_name in times.items()}

    def _round(self, number: int) -> dict[str, float]:
        names = list(self.entrants)
        first = number % len(names)
        order = names[first:] + names[:first]
        while True:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self.head_start_ms * self.cycles_per_ms))
            head_start = torch.cuda.Event()
            head_start.record()
            events = {name: self._issue(name) for name in order}
            in_time = not head_start.query()
            torch.cuda.synchronize()
            if in_time or self.head_start_ms >= LONGEST_HEAD_START_MS:
                return {name: start.elapsed_time(end) for name, (start, end) in events.items()}
            self.head_start_ms *= 2

    def _issue(self, name: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        calls = self.entrants[name]
        call = calls[self.calls % len(calls)]
        self.calls += 1
        start.record()
        call()
        end.record()
        return start, end


def summary(times: Sequence[float]) -> Timing:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return Timing(ms=median, spread=(high - low) / median, runs=len(times))


_FMA_SOURCE = """
extern "C" __global__ void fma_rate(float* data, int steps) {
  float sums[16];
  #pragma unroll
  for (int n = 0; n < 16; ++n) sums[n] = threadIdx.x + n;
  const float x = data[0], y = data[1];
  for (int step = 0; step < steps; ++step) {
    #pragma unroll
    for (int n = 0; n < 16; ++n) sums[n] = fmaf(sums[n], x, y);
  }
  float total = 0;
  #pragma unroll
  for (int n = 0; n < 16; ++n) total += sums[n];
  if (total == 12345.678f) data[2] = total;  // never, but the compiler does not know
}
"""


def fma_tflops(multiprocessors: int) -> float | None:
    """The card's f32 multiply-adds, by a kernel of nothing else; None where torch cannot compile it."""
    blocks, threads, steps = 8 * multiprocessors, 256, 20000
    try:
        kernel = torch.cuda._compile_kernel(_FMA_SOURCE, "fma_rate")
        data = torch.rand(4, device="cuda")
        call = lambda: kernel((blocks, 1, 1), (threads, 1, 1), (data, steps))  # noqa: E731
        ms = statistics.median([time_once(call) for _ in range(12)][2:])
    except Exception as error:  # the function is private to torch and may change
        print(f"no FMA kernel: {error}")
        return None
    return blocks * threads * steps * 16 * 2 / ms * 1e-9


def matmul_tflops(size: int = 8192) -> float:
    """torch's f32 matrix product, without TF32: what a library reaches of that rate."""
    x, y = (torch.randn(size, size, device="cuda") for _ in range(2))
    ms = statistics.median([time_once(lambda: x @ y) for _ in range(12)][2:])
    return 2 * size**3 / ms * 1e-9
