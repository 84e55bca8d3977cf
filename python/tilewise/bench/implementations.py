"""What takes part in a benchmark: our kernels by name, and every peer that is there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise.bench.operands import DTYPES, Operands, block_grid, visible
from tilewise.bench.problem import BLOCK, Problem

Attend = Callable[[], Tensor]
FLASH_ATTN_4 = "flash_attn.cute"
PACKAGES = {  # peers on CUDA devices, and the module by which each is found
    "flash-attn": "flash_attn.flash_attn_interface",  # FlashAttention-4 alone brings a flash_attn as well
    "flash-attn 3": "flash_attn_interface",
    "flash-attn 4": FLASH_ATTN_4,
    "xformers": "xformers",
    "flashinfer": "flashinfer",
}
REFERENCE_FLOPS = 0.6e9  # a tenth of a second on two cores


class CannotTake(RuntimeError):
    """Why an implementation does not take a problem."""


@dataclass(frozen=True)
class Implementation:
    name: str
    ours: bool
    bind: Callable[
        [Any, Any], Callable[[], Any]
    ]  # of problem and inputs: prepares masks and the like, or raises
    scope: Callable[[], AbstractContextManager[Any]] = (
        nullcontext  # entered around calls, outside of the time
    )
    on_demand: bool = False  # takes part only where a suite or --kernels names it

    @contextmanager
    def around(self, problem: Any) -> Iterator[None]:
        """The scope, and for a peer what makes its gradients the same bits each time where that is asked."""
        asked = not self.ours and getattr(problem, "deterministic", False)
        with self.scope(), repeatable() if asked else nullcontext():
            yield


@contextmanager
def repeatable() -> Iterator[None]:
    """PyTorch's kernels give the same bits each time, or refuse. They fill no memory: that would be timed."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warning)
        memory.fill_uninitialized_memory = before[1]


Results = tuple[Tensor, ...]


def call_of(implementation: Implementation, problem: Any, inputs: Any) -> Callable[[], Results]:
    """The pass as a call. Forward records nothing for a backward, and backward finds its forward done.

    Of several results, gradients are taken through the first.
    """
    compute = implementation.bind(problem, inputs)
    leaves, d_o = inputs.inputs, inputs.d_o

    def forward() -> Results:
        with torch.no_grad():
            result = compute()
        return result if isinstance(result, tuple) else (result,)

    def both() -> Results:
        out = _first(compute())
        return (out.detach(), *torch.autograd.grad(out, leaves, d_o))

    if problem.direction == "forward":
        return forward
    if problem.direction == "both":
        return both
    with implementation.around(problem):
        out = _first(compute())
    return lambda: torch.autograd.grad(out, leaves, d_o, retain_graph=True)


# Tilewise


def verdicts(explanation: str) -> dict[str, str]:
    """Of what `tilewise.explain` says: each kernel with chosen, able, or why it cannot.

    >>> verdicts("forward f32 ...\\n  fused: cannot: expected CUDA\\n  simd: chosen\\n")
    {'fused': 'cannot: expected CUDA', 'simd': 'chosen'}
    """
    lines = [line.strip() for line in explanation.splitlines() if line.startswith("  ")]
    return {kernel: verdict for kernel, _, verdict in (line.partition(": ") for line in lines)}


def refusal(error: str, kernel: str) -> str:
    """Why a kernel cannot, of the explanation in an error; of one without, its first line.

    >>> refusal("no kernel takes this:\\n  fused: cannot: expected CUDA", "fused")
    'expected CUDA'
    >>> refusal("q: expected 4 dims\\nmore", "fused")
    'q: expected 4 dims'
    """
    return verdicts(error).get(kernel, error.splitlines()[0]).removeprefix("cannot: ")


def kernels_on(device: torch.device) -> dict[str, str]:
    """Every kernel, in order of choice: "usable" on the device for some type, or why not.

    What is on trial takes part where the environment has TILEWISE_TRIAL=1.
    """
    found: dict[str, str] = {}
    trials = os.environ.get("TILEWISE_TRIAL", "0") not in ("", "0")
    # Some kernels leave small problems to others, or common head dims.
    for dtype, (rows, dim) in itertools.product(DTYPES.values(), ((512, 64), (16, 64), (512, 512))):
        x = torch.zeros(1, 8, rows, dim, dtype=dtype, device=device)
        try:
            said = verdicts(tilewise.explain(x, x, x))
        except tilewise.Error as error:  # a build without CUDA, say
            said = dict.fromkeys(tilewise.kernels(), str(error))
        for kernel, verdict in said.items():
            if found.get(kernel) != "usable":
                on_trial = trials and verdict.startswith("cannot: trial: ")
                usable = verdict == "chosen" or verdict.startswith("able") or on_trial
                found[kernel] = "usable" if usable else verdict.removeprefix("cannot: ")
    return found


def bind_tilewise(kernel: str, problem: Problem, operands: Operands) -> Attend:
    if kernel == "reference" and problem.flops > REFERENCE_FLOPS:
        raise CannotTake(f"too slow for more than {REFERENCE_FLOPS * 1e-9:g} GFLOP")
    options: dict[str, Any] = {"kernel": kernel, "alignment": problem.alignment}
    options["deterministic"] = problem.deterministic
    options["precision"] = problem.precision
    if problem.window is not None:
        options["window"] = (problem.window, problem.window)
    if problem.blocks < 1:
        grid = block_grid(problem, operands.q.device)
        counts = torch.zeros(1, 1, len(grid), dtype=torch.int32, device=grid.device)
        full_counts = grid.sum(-1, dtype=torch.int32)[None, None]
        # Kept blocks first, in order.
        listed = (~grid).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)[None, None]
        empty = torch.zeros_like(listed)
        options["block_mask"] = tilewise.BlockMask(counts, empty, full_counts, listed.contiguous())
    return functools.partial(
        tilewise.attention,
        *operands.inputs,
        operands.mask,
        problem.dropout,
        problem.causal,
        enable_gqa=problem.hq != problem.hkv,
        **options,
    )


# PyTorch


def sdpa_mask(problem: Problem, operands: Operands) -> tuple[Tensor | None, bool]:
    """attn_mask and is_causal that make SDPA compute the problem."""
    if problem.window is None and problem.blocks >= 1:
        if not problem.causal or problem.sq == 1:  # one query, at the last key, sees all
            return operands.mask, False
        if problem.sq == problem.sk and operands.mask is None:
            return None, True
    seen = visible(problem, operands.q.device)
    assert seen is not None
    if operands.mask is None:
        return seen, False
    if operands.mask.dtype == torch.bool:
        return operands.mask & seen, False
    return operands.mask.masked_fill(~seen, -torch.inf), False


def bind_sdpa(problem: Problem, operands: Operands) -> Attend:
    mask, causal = sdpa_mask(problem, operands)
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    gqa = problem.hq != problem.hkv
    return functools.partial(attend, *operands.inputs, mask, problem.dropout, causal, enable_gqa=gqa)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Past the limit it would run without being compiled, and say so to nobody.
    torch._dynamo.config.recompile_limit = 1000
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=1)
def flex_mask(problem: Problem, device: torch.device) -> Any:
    """torch's BlockMask of a problem; None where nothing is hidden.

    The window is a tensor: as a number it would be compiled anew for every other one.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    offset, causal = problem.sk - problem.sq, problem.causal
    unpadded = problem.unpadded if problem.mask == "padding" else None
    grid = block_grid(problem, device) if problem.blocks < 1 else None
    window = None if problem.window is None else torch.tensor(problem.window, device=device)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        keep = (j <= i + offset) if causal else (j >= 0)
        if window is not None:
            keep = keep & (j >= i + offset - window)
            keep = keep if causal else keep & (j <= i + offset + window)
        if grid is not None:
            keep = keep & grid[i // BLOCK, j // BLOCK]
        if unpadded is not None:
            keep = keep & (j < unpadded)
        return keep

    if not (causal or window is not None or grid is not None or unpadded is not None):
        return None
    return create_block_mask(seen, None, None, problem.sq, problem.sk, device=str(device))


def bind_flex(problem: Problem, operands: Operands) -> Attend:
    _refuse(problem, "FlexAttention", dropout=True, deterministic=True)

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + operands.mask[i, j]  # type: ignore[index]

    return functools.partial(
        compiled_flex(),
        *operands.inputs,
        score_mod=biased if problem.mask == "additive" else None,
        block_mask=flex_mask(problem, operands.q.device),
        enable_gqa=problem.hq != problem.hkv,
    )


# Packages that take [B, S, H, D]; ours are handed over as views.


def _swapped(operands: Operands) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in operands.inputs)


def _refuse(problem: Problem, who: str, **unable: bool) -> None:
    given = {
        "mask": problem.mask is not None,
        "blocks": problem.blocks < 1,
        "dropout": problem.dropout > 0,
        "window": problem.window is not None,
        "gqa": problem.hq != problem.hkv,
        "batch": problem.b > 1,
        "gradient": problem.direction != "forward",
        "f32": problem.dtype == "f32",
        "dv": problem.dv != problem.d,
        "deterministic": problem.deterministic,
    }
    for feature in unable:
        if given[feature]:
            raise CannotTake(f"{who} is not measured with {feature}")


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def bind_flash_attn(module: str, problem: Problem, operands: Operands) -> Attend:
    _refuse(problem, module, mask=True, blocks=True, dropout=True, f32=True, dv=True)
    function = importlib.import_module(module).flash_attn_func
    left = -1 if problem.window is None else problem.window
    window = (left, 0 if problem.causal else left) if problem.window is not None else (-1, -1)
    rows = _swapped(operands)
    options = {"causal": problem.causal, "window_size": window, "deterministic": problem.deterministic}
    return lambda: _first(function(*rows, **options)).transpose(1, 2)


def bind_flash_attn_4(problem: Problem, operands: Operands) -> Attend:
    """It compiles for every other kind of problem, which takes seconds: before the timing, as all warm up."""
    _refuse(problem, "FlashAttention-4", mask=True, blocks=True, dropout=True, f32=True)
    function = importlib.import_module(FLASH_ATTN_4).flash_attn_func
    left = problem.window  # None is no bound
    right = 0 if problem.causal and left is not None else left
    rows = _swapped(operands)
    options = {
        "causal": problem.causal,
        "window_size": (left, right),
        "deterministic": problem.deterministic,
    }
    return lambda: _first(function(*rows, **options)).transpose(1, 2)


def bind_xformers(problem: Problem, operands: Operands) -> Attend:
    unable = dict.fromkeys(("mask", "blocks", "dropout", "window", "gqa", "dv", "deterministic"), True)
    _refuse(problem, "xFormers", **unable)
    ops: Any = importlib.import_module("xformers.ops")
    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if problem.causal else None
    rows = _swapped(operands)
    return lambda: ops.memory_efficient_attention(*rows, attn_bias=bias).transpose(1, 2)


def bind_flashinfer(problem: Problem, operands: Operands) -> Attend:
    _refuse(
        problem,
        "FlashInfer",
        mask=True,
        blocks=True,
        dropout=True,
        batch=True,
        gradient=True,
        f32=True,
        dv=True,
    )
    flashinfer: Any = importlib.import_module("flashinfer")
    if problem.window is not None and not problem.causal:
        raise CannotTake("FlashInfer supports windows to the left only")
    q, k, v = (x[0] for x in _swapped(operands))
    left = -1 if problem.window is None else problem.window

    def attend() -> Tensor:
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=problem.causal, window_left=left)
        return out.transpose(0, 1)[None]

    return attend


# The list


def all_for(device: torch.device) -> list[Implementation]:
    """Our kernels that this device can run, slowest first, as a ladder is read; then the peers."""
    usable = [name for name, verdict in kernels_on(device).items() if verdict == "usable"]
    ours = [Implementation(name, True, functools.partial(bind_tilewise, name)) for name in reversed(usable)]
    return ours + list(_peers(device))


def _peers(device: torch.device) -> Iterator[Implementation]:
    backends = {"torch math": SDPBackend.MATH, "torch flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        backends["torch efficient"] = SDPBackend.EFFICIENT_ATTENTION
        backends["torch cudnn"] = SDPBackend.CUDNN_ATTENTION
    for name, backend in backends.items():
        yield Implementation(name, False, bind_sdpa, functools.partial(sdpa_kernel, backend))
    yield Implementation("torch flex", False, bind_flex, on_demand=True)  # compiles for every problem
    if device.type != "cuda":
        return
    binds: dict[str, Callable[[Any, Any], Attend]] = {
        "flash-attn": functools.partial(bind_flash_attn, "flash_attn"),
        "flash-attn 3": functools.partial(bind_flash_attn, "flash_attn_interface"),
        "flash-attn 4": bind_flash_attn_4,
        "xformers": bind_xformers,
        "flashinfer": bind_flashinfer,
    }
    for name, module in PACKAGES.items():
        if _installed(module):
            yield Implementation(name, False, binds[name])


def absent() -> list[str]:
    """Peers on CUDA devices whose packages are not installed."""
    return [name for name, module in PACKAGES.items() if not _installed(module)]


def missing(device: torch.device) -> str:
    """Which of these take no part, in a sentence."""
    if device.type != "cuda":
        return f"peers for CUDA devices only: {', '.join(PACKAGES)}"
    return f"peers that are not installed: {', '.join(absent()) or 'none'}"


def _installed(module: str) -> bool:
    """Whether a module is there. Of a submodule, whether its package can be imported, too."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
