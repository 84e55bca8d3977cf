"""Products at the sizes that choose among the GPU's tiles and kernels, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import assert_within_contract
from tilewise import _layer_ops
from tilewise.bench.implementations import verdicts
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# Llama-2 7B's, ViT-B/16's, and some that fit no tile: rows, columns, summands.
SIZES = [(512, 11008, 4096), (1024, 4096, 4096), (2048, 11008, 4096), (6304, 768, 768), (700, 1000, 520)]


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def products(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    scale = k**-0.5
    return {
        "x": normal(m, k, dtype=dtype),
        "weight": normal(n, k, scale=scale, dtype=dtype),
        "gate": normal(n, k, scale=scale, dtype=dtype),
        "bias": normal(n, dtype=dtype),
        "residual": normal(m, n, dtype=dtype),
    }


def in_double(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in values.items()}


def plain(x: Tensor, weight: Tensor, gate: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + residual


def with_gelu(x: Tensor, weight: Tensor, gate: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias)) + residual


def with_gate(x: Tensor, weight: Tensor, gate: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, weight, bias) + residual


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_large_products_are_as_near_as_pytorch(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    values = products(*size, dtype=dtype)
    x, weight, gate, bias, residual = values.values()
    ours: dict[Any, Tensor] = {
        plain: tilewise.linear(x, weight, bias, residual=residual),
        with_gelu: tilewise.linear(x, weight, bias, residual=residual, activation="gelu"),
        with_gate: tilewise.linear(x, weight, bias, gate=gate, residual=residual, activation="silu"),
    }
    for function, result in ours.items():
        exact, theirs = function(**in_double(values)), function(**values)
        assert_within_contract(function.__name__, result, exact, theirs)


def test_both_kernels_for_plain_products_are_right_and_repeat_themselves() -> None:
    values = products(1000, 768, 1024)
    x, weight, _, bias, residual = values.values()
    exact, theirs = plain(**in_double(values)), plain(**values)
    said = verdicts(_layer_ops.explain_gemm(x, weight, bias))
    for kernel in ("wgmma", "cublaslt"):
        if said[kernel].startswith("cannot"):
            pytest.skip(f"{kernel} {said[kernel]}")
        results = [tilewise.linear(x, weight, bias, residual=residual, kernel=kernel) for _ in range(3)]
        assert_within_contract(kernel, results[0], exact, theirs)
        assert all(torch.equal(results[0], again) for again in results[1:])


@pytest.mark.parametrize("by_columns", [(), ("weight",), ("x", "weight")], ids=str)
@pytest.mark.parametrize("size", [(4096, 4096, 4096), (4000, 4008, 4104), (200, 136, 4104)], ids=str)
def test_wgmma_is_as_near_where_blocks_work_in_pairs(
    size: tuple[int, int, int], by_columns: tuple[str, ...]
) -> None:
    values = products(*size)
    for name in by_columns:
        values[name] = values[name].t().contiguous().t()
    x, weight, _, bias, residual = values.values()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    ours = tilewise.linear(x, weight, bias, residual=residual, kernel="wgmma")
    assert_within_contract("wgmma", ours, plain(**in_double(values)), plain(**values))


def test_a_product_by_cublaslt_is_captured_into_a_graph() -> None:
    x, weight, _, bias, residual = products(300, 520, 264).values()
    if verdicts(_layer_ops.explain_gemm(x, weight, bias))["cublaslt"].startswith("cannot"):
        pytest.skip("no cuBLASLt")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call of this size: its algorithm is asked for here
        out = tilewise.linear(x, weight, bias, residual=residual, kernel="cublaslt")
    x.copy_(normal(300, 264))
    graph.replay()
    assert torch.equal(out, tilewise.linear(x, weight, bias, residual=residual, kernel="cublaslt"))


@pytest.mark.parametrize("bias", [False, True])
def test_projections_by_one_product_are_those_by_three(bias: bool) -> None:
    layer = tilewise.nn.TransformerLayer(
        "llama-2-7b", embed_dim=512, num_heads=4, num_kv_heads=2, head_dim=128, ffn_dim=1024, qkv_bias=bias
    )
    layer = layer.to("cuda", torch.bfloat16).requires_grad_(False)
    x = normal(2, 150, 512)
    parts = (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
    for joint, part in zip(layer._project(x), parts, strict=True):
        exact = F.linear(x.double(), part.weight.double(), None if part.bias is None else part.bias.double())
        assert joint.stride(1) == 1024  # one result has them all
        assert_within_contract("projection", joint, exact, F.linear(x, part.weight, part.bias))
