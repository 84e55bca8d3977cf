"""Hand-made records for the tests of reports: every figure is made up and easy to follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENVIRONMENT = {"device": "cuda", "gpu": "Example GPU", "driver": "1.2", "torch": "2.10", "date": "2020-01-02"}
RATES = [
    {"op": "rate", "impl": "gemm", "dtype": "f32", "tflops": 40.0},
    {"op": "rate", "impl": "gemm", "dtype": "bf16", "tflops": 800.0},
    {"op": "rate", "impl": "copy", "dtype": None, "gbps": 4000.0},
]


def row(impl: str, ms: float | None, **more: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        **{"suite": "ladder", "op": "attention", "pass": "forward", "impl": impl, "device": "cuda"},
        **{"dtype": "f32", "b": 1, "hq": 8, "hkv": 8, "sq": 1024, "sk": 1024, "d": 64, "dv": 64},
        **{"causal": False, "window": None, "features": "", "ms": ms, "spread": 0.01, "error": 1e-6},
        **{"tflops": None, "gbps": None, "peak_mb": None},
    } | more
    if ms is None:
        return {**line, "spread": None, "error": None, "skipped": more.get("skipped", "out of memory")}
    flops = 4 * line["hq"] * line["sq"] * line["sk"] * line["d"]
    size = 4 * 4 * line["hq"] * line["sq"] * line["d"]
    return {**line, "tflops": flops / ms * 1e-9, "gbps": size / ms * 1e-6, "peak_mb": 2.0}


def rows() -> list[dict[str, Any]]:
    """Two passes over four lengths: fused is twice as fast as torch's best at 1024, as fast at 128."""
    found = []
    for direction, factor in (("forward", 1.0), ("backward", 3.0)):
        for sq, gain in ((128, 1.0), (256, 1.5), (512, 1.8), (1024, 2.0)):
            ms = factor * 1e-6 * sq**2
            size = {"pass": direction, "sq": sq, "sk": sq}
            found += [
                row("naive", 20 * ms, **size),
                row("fused", ms, **size),
                row("torch math", 4 * ms, **size, error=2e-6),
                row("torch efficient", gain * ms, **size),
                row("torch flash", None, **size, skipped="PyTorch has no such kernel for <this> & that"),
            ]
    return found


def write(path: Path, lines: list[dict[str, Any]] | None = None, finished: bool = True) -> Path:
    everything: list[dict[str, Any]] = [
        {"environment": ENVIRONMENT},
        *RATES,
        *(rows() if lines is None else lines),
    ]
    if finished:
        everything.append({"finished": "2020-01-02"})
    path.write_text("".join(json.dumps(line) + "\n" for line in everything))
    return path
