"""Times a call of Tilewise and of torch's SDPA on tiny tensors, where the attention itself takes no time.

In a checkout, after make build, with PYTHONPATH=python and
TILEWISE_TORCH_LIBRARY=build/release/bindings/torch/_tilewise.so in the environment of .venv/bin/python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import tilewise
import torch
import torch.nn.functional as F


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median milliseconds of each call. They take turns until `seconds` are spent."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


class _Empty(torch.autograd.Function):
    """An autograd function in Python that does nothing, to time the cost of recording a gradient."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.detach()
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


def tiny(seconds: float) -> None:
    """Prints the time of a call on tensors of 4 x 8."""
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    calls: dict[str, Callable[[], object]] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "Tilewise": lambda: tilewise.attention(q, k, v),
        "SDPA, gradient recorded": lambda: F.scaled_dot_product_attention(*leaves),
        "Tilewise, gradient recorded": lambda: tilewise.attention(*leaves),
        "an operator without work": torch.ops.tilewise.version.default,
        "a gradient recorded of nothing": lambda: _Empty.apply(*leaves),
    }

    def often(call: Callable[[], object]) -> Callable[[], object]:
        def calls() -> None:
            for _ in range(200):
                call()

        return calls

    for name, milliseconds in medians({name: often(call) for name, call in calls.items()}, seconds).items():
        print(f"{name:<32}{1e3 * milliseconds / 200:8.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tiny(arguments.seconds)


if __name__ == "__main__":
    main()
