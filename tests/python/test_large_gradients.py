"""Gradients of calls with many results, in which a few pairs decide on the largest error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import Tensors, assert_twice, moved
from tilewise import attention
from torch import Tensor

SEEDS = range(4)


def gradients(query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, **options: Any) -> Tensors:
    """Of our attention; without options of PyTorch's operations in the type of the tensors."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    if options:
        out = attention(*leaves, **options)
    else:
        scores = leaves[0] @ leaves[1].mT * query.shape[-1] ** -0.5
        out = F.softmax(scores, dim=-1) @ leaves[2]
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, d_out), strict=True))


def check(
    device: str, options: dict[str, str], measure: torch.dtype, heads: int, tokens: int, dim: int, seed: int
) -> None:
    """Against twice the error of PyTorch's operations in the type `measure`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(1, heads, tokens, dim, generator=generator).bfloat16().to(device) for _ in range(4)
    ]

    def draw(n: int) -> tuple[Tensors, Tensors]:
        values = [moved(x, n) if n else x for x in tensors]
        return gradients(*(x.double() for x in values)), gradients(*(x.to(measure) for x in values))

    assert_twice(gradients(*tensors, **options), draw)


# Weights of 0.08 to 0.15 are the highest that most rows have here.
sizes = pytest.mark.parametrize(("heads", "tokens", "dim"), [(64, 512, 64), (32, 256, 128), (32, 384, 128)])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
@sizes
def test_gradients_of_large_calls_are_within_the_contract(
    kernel: str, heads: int, tokens: int, dim: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if kernel == "wgmma" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("wgmma is Hopper's")
    for seed in SEEDS:
        check("cuda", {"kernel": kernel}, torch.bfloat16, heads, tokens, dim, seed)


@pytest.mark.gpu
@sizes
def test_strict_gradients_of_large_calls_are_within_the_contract(heads: int, tokens: int, dim: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for seed in SEEDS:
        check("cuda", {"precision": "strict"}, torch.float32, heads, tokens, dim, seed)
