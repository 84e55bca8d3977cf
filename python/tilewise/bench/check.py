"""`tilewise check`: every kernel against float64, beside what PyTorch's own arithmetic makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.bench import exact, kinds, measure
from tilewise.bench.implementations import CannotTake, Implementation, call_of
from tilewise.bench.kinds import AnyProblem
from tilewise.bench.operands import DTYPES
from tilewise.bench.table import column

_FIGURES = f"{'mean':>10}{'relative':>10}"
_TITLES = f"{'result':8}{'largest':>10}{_FIGURES}   {'torch: largest':>14}{_FIGURES}"


def ours(op: str, device: torch.device, parts: Sequence[str]) -> list[Implementation]:
    """Our kernels for an operation whose names have one of the parts."""
    every = [x for x in kinds.taking_part(op, device) if x.ours]
    return [x for x in every if any(part in x.name for part in parts)] if parts else every


def check(problems: Sequence[AnyProblem], kernels: Sequence[str], device: torch.device, flops: float) -> int:
    """Prints a table of the kernels whose names have one of the parts, or of all.

    Returns how many results are beyond the contract.
    """
    beyond = checked = 0
    for problem in problems:
        if getattr(problem, "dropout", 0) > 0:
            print(f"{problem}: left out, since every implementation draws its own dropout mask")
            continue
        torch.manual_seed(0)
        with measure.making(problem):
            inputs = kinds.inputs(problem, device)
        errors_of = kinds.check(problem, inputs, flops)
        checked_here = ours(problem.op, device, kernels)
        width = column(kernel.name for kernel in checked_here)
        print(f"{problem}, {errors_of.about}\n  {'kernel':{width}}{_TITLES}")
        for kernel in checked_here:
            try:
                results = call_of(kernel, problem, inputs)()
            except (CannotTake, RuntimeError, ValueError) as error:
                print(f"  {kernel.name:{width}}{measure.reason_of(error)}")
                continue
            math = errors_of.of_torch(kernel.name)
            for name, us, torchs in zip(errors_of.names, errors_of(results), math, strict=True):
                checked += 1
                fine = exact.within_contract(us, torchs, torch.finfo(DTYPES[problem.dtype]).eps)
                beyond += not fine
                print(
                    f"  {kernel.name:{width}}{name:8}{us.largest:>10.1e}{us.mean:>10.1e}{us.relative:>10.1e}"
                    f"   {torchs.largest:>14.1e}{torchs.mean:>10.1e}{torchs.relative:>10.1e}"
                    f"{'' if fine else '   MORE than twice'}"
                )
    print(f"\n{checked} results, {beyond} with more than twice the error of PyTorch's arithmetic")
    return beyond
