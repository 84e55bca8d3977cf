"""The kernel written in Triton: where it runs, what it refuses, and its operators.

Triton is not needed to install or import Tilewise. It is imported by the first call that runs this kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise._binding import (
    BACKWARD_OWN,
    INDEX,
    LIBRARY,
    attention_kernels,
    complete,
    explain_attention,
)
from tilewise._errors import Unsupported

NAME = "triton"
_CPU_KERNELS = ("simd", "reference")
_LONGEST = 2**29  # positions and their differences are numbers of 32 bits


_NATIVE = tuple(attention_kernels())
NAMES = (*(x for x in _NATIVE if x not in _CPU_KERNELS), NAME, *_CPU_KERNELS)


def kernel_names() -> list[str]:
    """Names of all kernels of attention, fastest first, whatever this machine can run.

    >>> kernel_names()[-3:]
    ['triton', 'simd', 'reference']
    """
    return list(NAMES)


# What it takes


class Refusal(NamedTuple):
    argument: str
    reason: str  # makes sense after "kernel 'triton'"


def installed() -> bool:
    try:
        spec = importlib.util.find_spec("triton")
    except ValueError:  # it was hidden, as tests do
        return False
    return spec is not None and spec.origin is not None  # a folder of this name has no origin


def refusal(arguments: Sequence[Any]) -> Refusal | None:
    """Why the kernel cannot take attention_forward's arguments; None where it can.

    Tensors without data are taken for ones on a GPU.
    """
    query, key = arguments[:2]
    if not installed():
        return Refusal("kernel", "needs the package triton, which is not installed: pip install triton")
    device = query.device.type
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return Refusal("kernel", "runs on GPUs; on the CPU it needs Triton's interpreter, which is for tests")
    if device not in ("cpu", "cuda", "xpu", "meta"):
        return Refusal("kernel", f"runs on NVIDIA, AMD and Intel GPUs, not on {device}")
    if query.dtype == torch.float64:
        return Refusal("query", "needs f32, f16 or bf16, got f64")
    for argument, what in (
        ("cumulative_q", "packed sequences"),
        ("page_table", "paged keys"),
        ("key_lengths", "key lengths"),
        ("block_counts", "block masks"),
        ("logit_scale", "a logit scale"),
    ):
        if arguments[INDEX[argument]] is not None:
            name = "block_mask" if argument == "block_counts" else argument
            return Refusal(name, f"does not support {what}")
    if arguments[INDEX["batch_invariant"]]:
        return Refusal("batch_invariant", "chooses tiles by the whole batch")
    for argument, x in (("query", query), ("key", key)):
        if x.dim() == 4 and x.shape[2] > _LONGEST:
            return Refusal(argument, f"supports sequence lengths up to {_LONGEST}, got {x.shape[2]}")
    return None


def check(arguments: Sequence[Any]) -> None:
    if found := refusal(arguments):
        raise Unsupported(f"{found.argument}: kernel '{NAME}' {found.reason}")


# Where "auto" takes it


def chosen(arguments: Sequence[Any]) -> bool:
    """Whether a call is this kernel's: it was named, or no other has code for the device."""
    name = arguments[INDEX["kernel_name"]]
    return name == NAME or (name is None and alone_on(arguments[0].device))


def alone_on(device: torch.device) -> bool:
    """Whether no other kernel can run on the device."""
    return is_foreign(device) or (device.type == "cuda" and not _has_native_code(device.index))


def is_foreign(device: torch.device) -> bool:
    """Whether the device is one that the library's own kernels do not know: Intel's GPUs, and AMD's."""
    return device.type == "xpu" or (device.type == "cuda" and torch.version.hip is not None)


def _has_native_code(index: int | None) -> bool:
    """Whether a CUDA kernel of the library runs on this GPU of NVIDIA's."""
    return _some_kernel_is_able(index)


@functools.cache
def _some_kernel_is_able(index: int | None) -> bool:
    from torch.utils._python_dispatch import _disable_current_modes  # a trace asks, too

    with contextlib.suppress(Exception), _disable_current_modes():
        x = torch.zeros(1, 1, 1, 8, device="cuda" if index is None else f"cuda:{index}")
        return "chosen" in explain_attention([], x, x, x)
    return True  # whatever is wrong, the library's own kernels say it best


# What torch.compiler.assume_constant_result does, but that loads the compiler.
_has_native_code.__dict__["_dynamo_marked_constant"] = True


# Operators


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    arguments = complete(arguments)
    _check_call(arguments)
    from tilewise._triton import launch

    return launch.forward(arguments)


def _backward(*arguments: Any) -> list[Tensor]:
    own, arguments = arguments[:BACKWARD_OWN], complete(arguments[BACKWARD_OWN:])
    _check_call(arguments)
    from tilewise._triton import launch

    return launch.backward(*own, arguments)  # type: ignore[call-arg]


def _check_call(arguments: tuple[Any, ...]) -> None:
    from tilewise._meta import check_attention

    check_attention(arguments)
    check(arguments)


LIBRARY.impl("triton_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("triton_backward", _backward, "CompositeExplicitAutograd")


# Words


def explained(needed: list[bool], arguments: tuple[Any, ...]) -> str:
    """What explain_attention says, with a line for this kernel before those of the CPU's kernels."""
    device, name = arguments[0].device, arguments[INDEX["kernel_name"]]
    others = _with_name(arguments, None) if name == NAME else arguments
    explain = _explained_elsewhere if is_foreign(device) else explain_attention
    head, *lines = explain(needed, *others).splitlines()
    if name == NAME:
        lines = [re.sub(": chosen$", ": able", line) for line in lines]
    taken = any(line.endswith(": chosen") for line in lines)
    if found := refusal(arguments):
        verdict = f"cannot: {found.reason}"
    else:
        verdict = "chosen" if name == NAME or (name is None and not taken) else "able"
    place = next(n for n, line in enumerate(lines) if line.startswith(f"  {_CPU_KERNELS[0]}:"))
    return "\n".join([head, *lines[:place], f"  {NAME}: {verdict}", *lines[place:], ""])


def _with_name(arguments: tuple[Any, ...], name: str | None) -> tuple[Any, ...]:
    index = INDEX["kernel_name"]
    return (*arguments[:index], name, *arguments[index + 1 :])


def _explained_elsewhere(needed: list[bool], *arguments: Any) -> str:
    """explain_attention on a device that the library does not know: the same problem on the CPU, without its
    data, says what the problem is; no kernel takes it."""
    device = arguments[0].device

    def on_cpu(x: Any) -> Any:
        return torch.zeros((), dtype=x.dtype).expand(x.shape) if isinstance(x, Tensor) else x

    head, *lines = explain_attention(needed, *map(on_cpu, arguments)).splitlines()
    unable = [f"{line.partition(': ')[0]}: cannot: does not run on {_place(device)}" for line in lines]
    return "\n".join([head.replace(" on cpu", f" on {device}"), *unable])


def _place(device: torch.device) -> str:
    return "AMD's GPUs" if device.type == "cuda" else str(device.type)
