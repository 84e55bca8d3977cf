"""What measuring asks of a problem, whatever its kind: attention, or one of the operations around it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import tilewise
from tilewise.bench import exact, implementations
from tilewise.bench.implementations import Implementation
from tilewise.bench.operands import Operands
from tilewise.bench.operations import OPERATIONS, Operation, calls
from tilewise.bench.operations.operation import Arguments
from tilewise.bench.problem import Problem

AnyProblem = Problem | Operation
Inputs = Operands | Arguments


class Check(Protocol):
    """Errors of results against float64."""

    about: str  # what was compared

    @property
    def names(self) -> Sequence[str]:
        """Of the results."""

    def __call__(self, results: Sequence[Tensor]) -> list[exact.Error]: ...
    def of_torch(self, kernel: str) -> list[exact.Error]:
        """Of PyTorch's own arithmetic, by which the kernel is measured."""


def inputs(problem: AnyProblem, device: torch.device) -> Any:
    """Random ones."""
    return Operands.random(problem, device) if isinstance(problem, Problem) else problem.arguments(device)


def check(problem: AnyProblem, given: Any, flops: float) -> Check:
    """Attention is checked on as many heads as the FLOPs allow, everything else as a whole."""
    if isinstance(problem, Problem):
        return exact.Check(problem, given, flops)
    return calls.Check(problem, given)


@functools.cache
def taking_part(op: str, device: torch.device) -> list[Implementation]:
    """Ours and every peer that is there, for problems of one kind."""
    if op == Problem.op:
        return implementations.all_for(device)
    return calls.all_for(OPERATIONS[op], device)


def chosen(problem: AnyProblem, device: torch.device) -> str:
    """The kernel that a user would get; "none" where there is none."""
    if not isinstance(problem, Problem):
        return problem.chosen(device)
    bound: Any = implementations.bind_tilewise("auto", problem, Operands.random(problem, device))
    text = tilewise.explain(*bound.args, **bound.keywords)
    backward = problem.direction != "forward"
    said = implementations.verdicts(text.partition("\nbackward")[2] if backward else text)
    return next((kernel for kernel, verdict in said.items() if verdict == "chosen"), "none")
