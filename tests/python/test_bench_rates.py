"""A machine's rates: what is counted, with times that are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tilewise.bench import rates

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def timed(monkeypatch: pytest.MonkeyPatch, *times: float) -> list[Callable[[], object]]:
    """once_ms gives these one after another, and runs nothing."""
    left, calls = list(times), []

    def once_ms(call: Callable[[], object], device: torch.device) -> float:
        calls.append(call)
        return left.pop(0)

    monkeypatch.setattr(rates, "once_ms", once_ms)
    return calls


def test_a_cpus_rate_is_its_best_and_a_gpus_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.1, 0.2, *(float(n) for n in range(1, 11))]  # the first two are not counted
    timed(monkeypatch, *times)
    assert rates._typical_ms(lambda: None, CPU) == 1.0
    timed(monkeypatch, *times)
    assert rates._typical_ms(lambda: None, CUDA) == 5.5


def test_a_product_counts_two_flops_a_summand() -> None:
    line = rates.gemm_line(CPU, "f32", 2.0)
    assert line == {"op": "rate", "impl": "gemm", "device": "cpu", "dtype": "f32", "tflops": 1.07374}
    assert rates.gemm_line(CUDA, "bf16", 2.0)["tflops"] == float(f"{2 * 8192**3 / 2.0 * 1e-9:.6g}")


def test_a_copy_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = timed(monkeypatch, *[4.0] * 12)
    assert rates.copy_gbps(CPU) == 2 * 2**27 / 4.0 * 1e-6
    assert bool((calls[0]() == 1).all())  # it is a copy of ones


def test_a_product_is_one_of_random_matrices() -> None:
    call = rates.gemm_call(CPU, "bf16")
    assert call is not None
    product: Any = call()
    assert product.shape == (1024, 1024) and product.dtype == torch.bfloat16 and product.std() > 1
    assert rates.gemm_call(CPU, "f16") is None  # seconds, in torch


def test_a_cpus_lines_are_products_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, *[2.0] * 36)
    lines = rates.measure(CPU, {"f32", "f16", "bf16"})
    assert {(x["impl"], x["dtype"]) for x in lines} == {("gemm", "f32"), ("gemm", "bf16"), ("copy", None)}


@pytest.mark.parametrize(("rate", "bare"), [(50.0, {("multiply-adds", "f32")}), (None, set())])
def test_f32_on_a_gpu_needs_the_rate_of_f16(
    monkeypatch: pytest.MonkeyPatch, rate: float | None, bare: set[tuple[str, str]]
) -> None:
    monkeypatch.setattr(rates, "gemm_call", lambda device, dtype: lambda: None)
    monkeypatch.setattr(rates, "fma_tflops", lambda: rate)
    monkeypatch.setattr(rates, "copy_gbps", lambda device: 4000.0)
    timed(monkeypatch, *[2.0] * 24)
    lines = rates.measure(CUDA, {"f32"})
    found = {(x["impl"], x["dtype"]) for x in lines}
    assert found == {("gemm", "f32"), ("gemm", "f16"), ("copy", None)} | bare
    assert lines[-1]["gbps"] == 4000.0


def test_multiply_adds_are_counted_by_threads_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda source, name: lambda *_: None, raising=False)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: None)
    timed(monkeypatch, *[2.0] * 12)
    assert rates.fma_tflops() == 8 * 10 * 256 * 20000 * 16 * 2 / 2.0 * 1e-9


def test_where_torch_compiles_no_kernel_there_is_no_such_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, name: str) -> None:
        raise RuntimeError("no NVRTC")

    properties = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", refuse, raising=False)
    assert rates.fma_tflops() is None
