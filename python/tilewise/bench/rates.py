"""Rates of the machine, measured in the same run as the rows that are compared with them.

They are rates of plain programs (PyTorch's matrix product, a copy, bare multiply-adds) and no limits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tilewise.bench.operands import DTYPES
from tilewise.bench.timing import once_ms

GEMM, COPY, FMA = "gemm", "copy", "multiply-adds"

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


def measure(device: torch.device, dtypes: set[str]) -> list[dict[str, Any]]:
    """A record's lines: torch's matrix product in each type, a copy, and on a GPU bare f32 multiply-adds.

    There f32 needs f16's rate, too: split products of f32 are three of f16.
    """
    if device.type == "cuda" and "f32" in dtypes:
        dtypes = dtypes | {"f16"}
    lines = [
        gemm_line(device, dtype, _typical_ms(gemm, device))
        for dtype in DTYPES
        if dtype in dtypes and (gemm := gemm_call(device, dtype))
    ]
    if device.type == "cuda" and "f32" in dtypes and (rate := fma_tflops()):
        lines.append(_line(device, FMA, "f32", tflops=rate))
    return [*lines, _line(device, COPY, None, gbps=copy_gbps(device))]


def _line(device: torch.device, name: str, dtype: str | None, **figures: float) -> dict[str, Any]:
    rounded = {key: float(f"{value:.6g}") for key, value in figures.items()}
    return {"op": "rate", "impl": name, "device": device.type, "dtype": dtype, **rounded}


def gemm_call(device: torch.device, dtype: str) -> Callable[[], object] | None:
    """torch's square matrix product, f32 without TF32. On a CPU none for f16: torch takes seconds for it."""
    if device.type == "cpu" and dtype == "f16":
        return None
    size = _gemm_size(device)
    x, y = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    return lambda: x @ y


def gemm_line(device: torch.device, dtype: str, ms: float) -> dict[str, Any]:
    """A record's line of the time that `gemm_call` took."""
    return _line(device, GEMM, dtype, tflops=2.0 * _gemm_size(device) ** 3 / ms * 1e-9)


def _gemm_size(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 1024


def copy_gbps(device: torch.device) -> float:
    """Bytes read and written by a copy that no cache holds."""
    size = 2**30 if device.type == "cuda" else 2**27
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _typical_ms(lambda: target.copy_(source), device) * 1e-6


def fma_tflops() -> float | None:
    """The GPU's f32 multiply-adds, by a kernel of nothing else; None where torch cannot compile it."""
    blocks, threads, steps = 8 * torch.cuda.get_device_properties(0).multi_processor_count, 256, 20000
    try:
        kernel = torch.cuda._compile_kernel(_FMA_SOURCE, "fma_rate")
        data = torch.rand(4, device="cuda")
        ms = _typical_ms(lambda: kernel((blocks, 1, 1), (threads, 1, 1), (data, steps)), torch.device("cuda"))
    except Exception:  # the function is private to torch and may change
        return None
    return blocks * threads * steps * 16 * 2 / ms * 1e-9


def _typical_ms(call: Callable[[], object], device: torch.device) -> float:
    """A GPU's median; a CPU's best, as somebody else may have its cores for a while."""
    times = [once_ms(call, device) for _ in range(12)][2:]
    return statistics.median(times) if device.type == "cuda" else min(times)
