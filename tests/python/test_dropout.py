"""Dropout: where its seeds come from, on a CPU, on a GPU and in a CUDA graph, and what repeats it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import rows
from tilewise import attention, nn, reference, scaled_dot_product_attention
from tilewise._seeds import _next_seed
from torch import Tensor


def test_dropout_is_governed_by_manual_seed(device: torch.device) -> None:
    q, k, v = rows(device=device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(attention(q, k, v, enable_gqa=True, dropout_p=0.5))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert not torch.equal(results[2], attention(q, k, v, enable_gqa=True, dropout_p=0.5))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dropout_of_1_leaves_nothing(device: torch.device, dtype: torch.dtype, kernel: str) -> None:
    if device.type == "cuda" and kernel == "reference":
        pytest.skip("the reference is on the CPU")
    q, k, v = rows(dtype, device)
    mask = torch.zeros(q.shape[2], k.shape[2], device=device, requires_grad=True)
    out, lse = attention(q, k, v, mask, 1.0, enable_gqa=True, kernel=kernel, return_lse=True)
    _, expected = attention(q, k, v, mask, enable_gqa=True, kernel=kernel, return_lse=True)
    assert not out.any()
    torch.testing.assert_close(lse, expected)  # the call without dropout may be another kernel's
    for gradient in torch.autograd.grad(out.float().square().sum() + out.float().sum(), (q, k, v, mask)):
        assert not gradient.any()


def test_a_dropout_of_1_is_torchs() -> None:
    q, k, v = rows(hkv=6)
    torchs_own = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(
        scaled_dot_product_attention(q, k, v, dropout_p=1.0), torchs_own(q, k, v, dropout_p=1.0)
    )
    assert not reference.attention(q, k, v, dropout_p=1.0).any()
    layer = nn.Attention(32, 4, dropout=1.0)
    x = torch.randn(2, 3, 32, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, layer.out_proj.bias.expand_as(out))
    assert not torch.autograd.grad(out.sum(), x)[0].any()


@pytest.mark.gpu
def test_dropout_on_a_gpu_is_governed_by_its_generator() -> None:
    q, k, v = rows(device="cuda")
    attend = functools.partial(attention, q, k, v, enable_gqa=True, dropout_p=0.5)
    torch.cuda.manual_seed(1)
    first, state = attend(), torch.cuda.get_rng_state()
    second = attend()
    torch.manual_seed(5)  # of every device
    third = attend()
    torch.cuda.manual_seed(1)
    torch.rand(3)  # of the CPU's alone
    assert torch.equal(attend(), first) and not torch.equal(first, second) and not torch.equal(second, third)
    torch.cuda.set_rng_state(state)
    assert torch.equal(attend(), second)


@pytest.mark.parametrize("seed", [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.arange(4)[::2]])
def test_a_malformed_seed_is_refused(seed: Tensor) -> None:
    q, k, v = rows()
    with pytest.raises(RuntimeError, match=r"dropout_seed: expected int64 \[2\], contiguous"):
        torch.ops.tilewise.attention_forward(q, k, v, None, 0.5, False, None, True, seed)


def captured_dropout(x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of both passes of attention from x [1, H, S, S], whose values are unit vectors, so that the
    output is the matrix of weights and, with such gradients, dv its transpose.
    """
    unit = torch.eye(x.shape[2], device=x.device, dtype=x.dtype).repeat(1, x.shape[1], 1, 1).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = attention(x, x, unit, dropout_p=0.5)
        (gradient,) = torch.autograd.grad(out, unit, unit.detach())
        return out, gradient

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradient = step()
    return graph, out, gradient


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cuda_graph_draws_dropout_anew_in_each_replay(dtype: torch.dtype) -> None:
    graph, out, gradient = captured_dropout(0.1 * torch.randn(1, 2, 64, 64, device="cuda", dtype=dtype))

    def masks(replays: int) -> list[Tensor]:
        found = []
        for _ in range(replays):
            graph.replay()
            kept = out != 0
            assert torch.equal(kept, gradient.transpose(-1, -2) != 0)  # backward has forward's mask
            assert 0.4 < kept.double().mean() < 0.6
            found.append(kept.clone())
        return found

    torch.cuda.manual_seed(1)
    first, second = masks(2)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(masks(2), (first, second), strict=True))
    torch.manual_seed(2)  # of every device
    assert not torch.equal(masks(1)[0], first)


@pytest.mark.gpu
def test_a_seed_on_the_gpu_gives_the_mask_of_one_on_the_cpu() -> None:
    seed = torch.tensor([-(2**62) - 5, 2**40 + 3])
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 4, 70, 32, device="cuda", dtype=dtype, requires_grad=True)
        results = []
        for place in ("cpu", "cuda"):
            out, _ = torch.ops.tilewise.attention_forward(
                q, q, q, None, 0.3, True, None, False, seed.to(place), deterministic=True
            )
            results.append((out, *torch.autograd.grad(out.float().square().sum(), q)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_graphed_callables_train_with_dropout() -> None:
    class Attend(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(x, x, x, dropout_p=0.5)

    sample = torch.randn(1, 2, 32, 16, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(Attend(), (sample,))
    x = torch.randn_like(sample, requires_grad=True)
    first = graphed(x).clone()
    graphed(x).sum().backward()
    assert x.grad is not None and not torch.equal(first, graphed(x))


def test_a_counting_generator_gives_a_seed_for_each_call() -> None:
    class Counting:
        offset = 8

        def initial_seed(self) -> int:
            return 2**64 - 3

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

    generator: Any = Counting()
    seeds = [_next_seed(generator).tolist() for _ in range(3)]
    assert [offset for _, offset in seeds] == [8, 12, 16] and len({seed for seed, _ in seeds}) == 1


def test_checkpointing_repeats_the_dropout(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = rows(device=device)
    attend = functools.partial(attention, enable_gqa=True, dropout_p=0.5)
    torch.manual_seed(5)
    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    torch.manual_seed(5)
    found = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
