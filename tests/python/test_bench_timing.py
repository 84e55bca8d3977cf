"""Timing: rounds that rotate, and a GPU that is given its work ahead of time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tilewise.bench import timing

CPU = torch.device("cpu")


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
