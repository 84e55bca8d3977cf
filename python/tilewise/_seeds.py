"""Seeds of dropout, from torch's generators."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from tilewise import _ops


def draw_seed(device: torch.device) -> Tensor:
    """The two words a dropout mask is drawn from: int64 [2], from torch's generator of the device.

    On the CPU where they are known when the kernels are launched. While a CUDA graph is captured they are
    drawn on the device, by an operator of torch's that draws others in each replay. Traced or transformed
    they come from the CPU's generator, which torch knows how to trace and to repeat under vmap.
    """
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()  # where tensors are fake it may not be
    if on_gpu and not torch.compiler.is_compiling():
        if torch.cuda.is_current_stream_capturing():
            return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
        if _ops.eager():
            return _next_seed(torch.cuda.default_generators[device.index])
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu")


_seed_lock = threading.Lock()


def _next_seed(generator: torch.Generator) -> Tensor:
    """Of a generator that counts, as CUDA's do on the host: its seed and where it stands, and moves it on.

    Nothing waits for the device. The seed is changed in some bits, as torch's own kernels use the same
    generator with the same words.
    """
    with _seed_lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # torch wants multiples of 4
    seed = (generator.initial_seed() ^ 0x9E3779B97F4A7C15) & (2**64 - 1)
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed, offset], dtype=torch.int64)
