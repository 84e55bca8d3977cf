"""Who takes part in an operation's race, and how exact results are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.bench import exact
from tilewise.bench.implementations import REFERENCE_FLOPS, CannotTake, Implementation, call_of
from tilewise.bench.operations import hugging_face, masked
from tilewise.bench.operations.operation import Arguments, Operation, widened

EAGER, COMPILED = "torch eager", "torch compiled"
COMPILED_GRAPH = "torch compiled graph"
Call = Callable[[], Any]


def all_for(kind: type[Operation], device: torch.device) -> list[Implementation]:
    """Our kernels, slowest first, then PyTorch; where a step is short, both from a CUDA graph, too."""
    names = kind.kernels(device)
    found = [Implementation(name, True, functools.partial(bind_ours, name)) for name in names]
    found.append(Implementation(EAGER, False, bind_eager))
    if kind.op == "decode-step" and device.type == "cuda":
        found.append(Implementation("tilewise graph", True, functools.partial(bind_graph, "tilewise")))
        found.append(Implementation("torch graph", False, functools.partial(bind_graph, EAGER)))
        compiled = functools.partial(bind_graph, COMPILED)
        found.append(Implementation(COMPILED_GRAPH, False, compiled, on_demand=True))
    if kind is masked.MaskedAttention:
        found.append(Implementation(masked.FLEX, False, masked.bind_flex, on_demand=True))
    if kind.op == "layer":
        found.append(Implementation(hugging_face.NAME, False, hugging_face.bind, on_demand=True))
    return [*found, Implementation(COMPILED, False, bind_compiled, on_demand=True)]


def bind_ours(kernel: str, problem: Operation, arguments: Arguments) -> Call:
    if kernel == "reference" and problem.flops > REFERENCE_FLOPS:
        raise CannotTake(f"too slow for more than {REFERENCE_FLOPS * 1e-9:g} GFLOP")
    return functools.partial(problem.ours, "auto" if kernel == "tilewise" else kernel, *arguments.values)


def bind_eager(problem: Operation, arguments: Arguments) -> Call:
    return functools.partial(problem.theirs, *arguments.values)


@functools.lru_cache(maxsize=1)
def _compiled(problem: Operation, device: str) -> Callable[..., Any]:
    """PyTorch's function, compiled for one problem and all its sets of inputs.

    Without CUDA graphs, which would copy the weights of every other set to where the first ones were.
    """
    torch._dynamo.reset()
    mode = "max-autotune-no-cudagraphs" if device == "cuda" else "default"
    return torch.compile(problem.theirs, mode=mode, dynamic=False)


def bind_compiled(problem: Operation, arguments: Arguments) -> Call:
    return functools.partial(_compiled(problem, arguments.values[0].device.type), *arguments.values)


def bind_graph(name: str, problem: Operation, arguments: Arguments) -> Call:
    """The call as a CUDA graph."""
    binds = {EAGER: bind_eager, COMPILED: bind_compiled}
    call = binds.get(name, functools.partial(bind_ours, name))(problem, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out = call()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


class Check:
    """Errors of an operation's results against PyTorch in float64."""

    about = "PyTorch in float64"

    def __init__(self, problem: Operation, arguments: Arguments) -> None:
        self.problem, self.arguments = problem, arguments
        self.exact = self._theirs(widened(arguments, torch.float64))
        outputs = len(self.exact) - len(arguments.inputs) * (problem.direction != "forward")
        self.names = [
            *(f"out {n}" for n in range(outputs)),
            *(f"d{n}" for n in range(len(self.exact) - outputs)),
        ]

    def __call__(self, results: Sequence[Tensor]) -> list[exact.Error]:
        return exact.errors(results, self.exact)

    def of_torch(self, kernel: str) -> list[exact.Error]:
        """Of PyTorch in the problem's own type."""
        return self(self._theirs(self.arguments))

    def _theirs(self, arguments: Arguments) -> Sequence[Tensor]:
        return call_of(Implementation(EAGER, False, bind_eager), self.problem, arguments)()
