"""Tensors without elements: results of the right shape, and gradients that are zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import leaf, lengths
from tilewise import nn
from tilewise.integrations import flash_attn, sdpa
from torch import Tensor
from torch.torch_version import TorchVersion

SIZES = {
    "no batch": (0, 2, 3, 5),
    "no batch of many queries": (0, 2, 300, 300),
    "no heads": (2, 0, 3, 5),
    "no queries": (2, 2, 0, 5),
    "no keys": (2, 2, 3, 0),
    "nothing": (0, 0, 0, 0),
}


def rows_first(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *rows: call(*(x.transpose(1, 2) for x in rows))


def by_torch(patch: Callable[..., Any]) -> Callable[..., Any]:
    def call(*rows: Tensor) -> Tensor:
        with sdpa.use():
            return patch()(*rows)

    return call


def additive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.zeros(query.shape[2], key.shape[2], device=query.device, requires_grad=True)
    return tilewise.attention(query, key, value, mask)


def drained(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    sinks = torch.zeros(query.shape[1], device=query.device, requires_grad=True)
    return tilewise.attention(query, key, value, sinks=sinks)


DOORS: dict[str, Callable[..., Any]] = {
    "attention": tilewise.attention,
    "with options": lambda *rows: tilewise.attention(*rows, window=(1, 1), deterministic=True),
    "with lse": lambda *rows: tilewise.attention(*rows, return_lse=True),
    "with dropout": lambda *rows: tilewise.attention(*rows, dropout_p=0.5),
    "with a mask": additive,
    "with sinks": drained,
    "torch's signature": tilewise.scaled_dot_product_attention,
    "in place of torch's": by_torch(lambda: F.scaled_dot_product_attention),
    "by torch's hook": by_torch(lambda: torch._C._nn.scaled_dot_product_attention),
    "flash_attn": rows_first(flash_attn.flash_attn_func),
    "traced": torch.compile(tilewise.attention, backend="aot_eager", dynamic=False),
}


def check_zero_gradients(call: Callable[..., Any], *tensors: Tensor) -> Any:
    out = call(*tensors)
    first = out[0] if isinstance(out, tuple) else out
    for x, gradient in zip(tensors, torch.autograd.grad(first.sum(), tensors), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()
    return first


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("size", SIZES)
def test_attention_of_nothing_has_a_gradient(device: torch.device, size: str, door: str) -> None:
    if door == "by torch's hook" and TorchVersion(torch.__version__) < (2, 11):
        pytest.skip("torch 2.10 cannot undo its hook")  # so sdpa does not set it
    if door == "by torch's hook" and size == "no heads" and device.type == "cuda":
        pytest.skip("torch gives f32 without heads to a kernel of its own, whose backward asserts")
    batch, heads, queries, keys = SIZES[size]
    q = leaf(batch, heads, queries, 8, device=device)
    k, v = (leaf(batch, heads, keys, 8, device=device) for _ in range(2))
    out = check_zero_gradients(DOORS[door], q, k, v)
    assert out.numel() == q.numel() and not out.any()


@pytest.mark.parametrize("queries", [0, 3])
@pytest.mark.parametrize("ends", [(0,), (0, 0)])
@pytest.mark.parametrize("call", [tilewise.attention_varlen, flash_attn.flash_attn_varlen_func])
def test_packed_sequences_without_tokens_have_a_gradient(
    device: torch.device, call: Callable[..., Any], ends: tuple[int, ...], queries: int
) -> None:
    cumulative = lengths(*ends, device=device)
    q, k, v = (leaf(count, 2, 8, device=device) for count in (queries, 0, 0))
    out = check_zero_gradients(lambda *rows: call(*rows, cumulative, cumulative, 0, 0), q, k, v)
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (2, 0, 8)])
def test_no_rows_have_a_gradient(device: torch.device, shape: tuple[int, ...]) -> None:
    x, residual = leaf(*shape, device=device), leaf(*shape, device=device)
    up, gate, down = (leaf(*size, device=device) for size in ((16, 8), (16, 8), (8, 16)))
    weight, bias = leaf(8, device=device), leaf(8, device=device)
    check = check_zero_gradients
    check(lambda a, b: tilewise.linear(a, b, activation="gelu"), x, up)
    check(lambda a, b, c: tilewise.linear(a, b, gate=c, activation="silu"), x, up, gate)
    check(lambda a, b, c, d: tilewise.ffn(a, b, c, gate=d), x, up, down, gate)
    check(lambda a, b, c, d: tilewise.ffn(a, b, c, residual=d, keep_products=True), x, up, down, residual)
    check(tilewise.rms_norm, x, weight)
    check(lambda a, b, c, d: tilewise.layer_norm(a, b, c, residual=d), x, weight, bias, residual)


def test_products_over_nothing_are_zero(device: torch.device) -> None:
    x, weight = leaf(3, 0, device=device), leaf(4, 0, device=device)
    assert not check_zero_gradients(tilewise.linear, x, weight).any()
    x, up, down = leaf(3, 5, device=device), leaf(0, 5, device=device), leaf(5, 0, device=device)
    assert not check_zero_gradients(tilewise.ffn, x, up, down).any()


SMALL = {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "ffn_dim": 48}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Attention": lambda: nn.Attention(32, 4, 2),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "LayerNorm": lambda: nn.LayerNorm(32),
    "FeedForward": lambda: nn.FeedForward(32, 48),
    "GatedFeedForward": lambda: nn.GatedFeedForward(32, 48),
    "Llama's layer": lambda: nn.TransformerLayer("llama-2-7b", **SMALL),
    "BERT's layer": lambda: nn.TransformerLayer("bert-base", **SMALL),
}


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32)])
@pytest.mark.parametrize("name", MODULES)
def test_modules_take_nothing(device: torch.device, name: str, shape: tuple[int, ...]) -> None:
    module = MODULES[name]().to(device)
    x = leaf(*shape, device=device)
    assert check_zero_gradients(module, x).shape == x.shape


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32)])
def test_multihead_attention_takes_nothing(device: torch.device, shape: tuple[int, ...]) -> None:
    module = nn.MultiheadAttention(32, 4, batch_first=True).to(device)
    check_zero_gradients(lambda x: module(x, x, x)[0], leaf(*shape, device=device))


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_rope_turns_nothing(device: torch.device, batch: int, length: int) -> None:
    q, k = leaf(batch, 2, length, 8, device=device), leaf(batch, 1, length, 8, device=device)
    tables = tilewise.rope_tables(4, 8, device=device)
    check_zero_gradients(lambda a, b: tilewise.apply_rope(a, b, *tables), q, k)


def test_a_cache_takes_no_tokens(device: torch.device) -> None:
    layer = nn.TransformerLayer("llama-2-7b", **SMALL).to(device).requires_grad_(False)
    cache = layer.make_cache(batch=2, capacity=4)
    assert layer(torch.randn(2, 0, 32, device=device), cache=cache).shape == (2, 0, 32)
    assert cache.lengths.tolist() == [0, 0]
