"""`tilewise check`: every kernel against float64, beside what PyTorch's own arithmetic makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.bench import exact, measure
from tilewise.bench.implementations import CannotTake, Implementation
from tilewise.bench.operands import DTYPES, Operands
from tilewise.bench.problem import Problem

_FIGURES = f"{'mean':>10}{'relative':>10}"
HEADER = f"  {'kernel':12}{'result':8}{'largest':>10}{_FIGURES}   {'torch: largest':>14}{_FIGURES}"


def check(
    problems: Sequence[Problem], kernels: Sequence[Implementation], device: torch.device, flops: float
) -> int:
    """Prints a table; returns how many results are beyond the contract."""
    beyond = checked = 0
    for problem in problems:
        if problem.dropout > 0:
            print(f"{problem}: left out, every implementation draws a dropout mask of its own")
            continue
        torch.manual_seed(0)
        operands = Operands.random(problem, device)
        groups = exact.groups_within(problem, flops)
        expected = exact.compute(problem, operands, groups)
        math = exact.errors(exact.math_path(problem, operands, groups), expected)
        of_heads = f"{len(groups)} of {problem.b * problem.hkv} key heads"
        print(f"{problem}, {of_heads}\n{HEADER}")
        for kernel in kernels:
            try:
                results = measure.call_of(kernel, problem, operands)()
            except (CannotTake, RuntimeError, ValueError) as error:
                print(f"  {kernel.name:12}{measure.reason_of(error)}")
                continue
            found = exact.errors([exact.of_groups(x, groups, problem.hkv) for x in results], expected)
            for name, us, torchs in zip(exact.NAMES[problem.direction], found, math, strict=True):
                checked += 1
                fine = exact.within_contract(us, torchs, torch.finfo(DTYPES[problem.dtype]).eps)
                beyond += not fine
                print(
                    f"  {kernel.name:12}{name:8}{us.largest:>10.1e}{us.mean:>10.1e}{us.relative:>10.1e}"
                    f"   {torchs.largest:>14.1e}{torchs.mean:>10.1e}{torchs.relative:>10.1e}"
                    f"{'' if fine else '   BEYOND twice'}"
                )
    print(f"\n{checked} results, {beyond} with more than twice the error of PyTorch's arithmetic")
    return beyond
