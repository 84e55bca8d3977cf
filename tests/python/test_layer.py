"""Products, feed-forward networks, norms and rotary embedding against PyTorch and float64."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import assert_within_contract, gradients, leaf
from tilewise import functional
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}

Function = Callable[..., Any]


def compare(ours: Function, theirs: Function, leaves: Sequence[Tensor]) -> None:
    """Outputs and gradients against theirs in float64, with theirs in the same type as the measure."""

    def run(function: Function, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*inputs)
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        torch.manual_seed(1)
        cotangents = [torch.randn(x.shape).to(leaves[0].dtype).to(x.device) for x in outputs]
        return [*outputs, *gradients(outputs, inputs, cotangents)]

    own = leaves[0].dtype
    results = run(ours, own), run(theirs, torch.float64), run(theirs, own)
    for index, (actual, exact, plain) in enumerate(zip(*results, strict=True)):
        assert_within_contract(f"result {index}", actual, exact, plain)


def scaled(*shape: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Weights that keep the size of what they are multiplied by."""
    return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [3, 57])
def test_linear_is_as_near_as_pytorch(
    rows: int, activation: Any, dtype: torch.dtype, device: torch.device
) -> None:
    where = {"dtype": dtype, "device": device}
    x, residual = leaf(2, rows, 96, **where), leaf(2, rows, 40, **where)
    weight, bias = scaled(40, 96, **where), leaf(40, **where)
    function = ACTIVATIONS[activation]
    compare(
        lambda x, w, b, r: tilewise.linear(x, w, b, activation=activation, residual=r),
        lambda x, w, b, r: function(F.linear(x, w, b)) + r,
        (x, weight, bias, residual),
    )
    if activation == "none":
        return
    gate, gate_bias = scaled(40, 96, **where), leaf(40, **where)
    compare(
        lambda x, w, g, b: tilewise.linear(x, w, gate=g, gate_bias=b, activation=activation),
        lambda x, w, g, b: function(F.linear(x, g, b)) * F.linear(x, w),
        (x, weight, gate, gate_bias),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bound", [0, 5000])
@pytest.mark.parametrize("kept", [False, True])
def test_ffn_is_as_near_as_pytorch(
    kept: bool, bound: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    where = {"dtype": dtype, "device": device}
    options: dict[str, Any] = {"max_intermediate_bytes": bound, "keep_products": kept}
    x, up, down = leaf(2, 45, 48, **where), scaled(130, 48, **where), scaled(48, 130, **where)
    gate, up_bias, down_bias = scaled(130, 48, **where), leaf(130, **where), leaf(48, **where)
    residual = leaf(2, 45, 48, **where)
    if gated:
        compare(
            lambda x, u, d, g, r: tilewise.ffn(x, u, d, gate=g, residual=r, activation="silu", **options),
            lambda x, u, d, g, r: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) + r,
            (x, up, down, gate, residual),
        )
    else:
        compare(
            lambda x, u, d, b, c: tilewise.ffn(x, u, d, up_bias=b, down_bias=c, activation="gelu", **options),
            lambda x, u, d, b, c: F.linear(F.gelu(F.linear(x, u, b)), d, c),
            (x, up, down, up_bias, down_bias),
        )


def test_ffn_keeps_products_for_a_backward_alone() -> None:
    x, up, down, gate = leaf(45, 48), leaf(130, 48), leaf(48, 130), leaf(130, 48)

    def saved(**options: Any) -> int:
        """Of [M, F], how many a graph holds."""
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            tilewise.ffn(x, up, down, gate=gate, activation="silu", **options)
        return sum(x.shape == (45, 130) for x in found)

    assert saved() == 0
    assert saved(keep_products=True) == 2
    with torch.no_grad():
        assert saved(keep_products=True) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 37, 256])
def test_norms_are_as_near_as_pytorch(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    where = {"dtype": dtype, "device": device}
    x, residual = leaf(3, 25, dim, **where), leaf(3, 25, dim, **where)
    weight, bias = leaf(dim, **where), leaf(dim, **where)

    def rms(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + r
        wide = summed.to(torch.promote_types(summed.dtype, torch.float32))
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w
        return out.to(summed.dtype), summed

    compare(lambda x, w, r: tilewise.rms_norm(x, w, residual=r), rms, (x, weight, residual))
    compare(
        lambda x, w, b: tilewise.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, (dim,), w, b),
        (x, weight, bias),
    )


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary = 2 * cos.shape[-1]
    wide = x[..., :rotary].to(torch.promote_types(x.dtype, torch.float32))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    parts = (a * cos - b * sin, b * cos + a * sin)
    both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([both.to(x.dtype), x[..., rotary:]], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 40])
@pytest.mark.parametrize("positions", ["none", "shared", "each"])
def test_rope_is_as_near_as_pytorch(
    positions: str, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    q = leaf(2, 11, 4, 40, dtype=dtype, device=device).transpose(1, 2)
    k = leaf(2, 2, 11, 40, dtype=dtype, device=device)
    cos, sin = tilewise.rope_tables(50, rotary_dim, device=device)
    shape = {"none": None, "shared": (11,), "each": (2, 11)}[positions]
    at = None if shape is None else torch.randint(50, shape, device=device)
    rows = torch.arange(11, device=device) if at is None else at
    chosen = [t[rows].unsqueeze(-3) for t in (cos, sin)]
    compare(
        lambda q, k: tilewise.apply_rope(q, k, cos, sin, at, interleaved=interleaved),
        lambda q, k: (turned(q, *chosen, interleaved), turned(k, *chosen, interleaved)),
        (q, k),
    )


@pytest.mark.parametrize("by_ends", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_into_cache_writes_what_rope_gives(
    dtype: torch.dtype, paged: bool, by_ends: bool, device: torch.device
) -> None:
    q, k, v = (leaf(2, h, 5, 16, dtype=dtype, device=device, grad=False) for h in (4, 2, 2))
    starts = torch.tensor([3, 0], dtype=torch.int32, device=device)
    positions = starts.unsqueeze(1) + torch.arange(5, device=device, dtype=torch.int32)
    tables = tilewise.rope_tables(20, 16, device=device)
    table = None
    shape: tuple[int, ...] = (2, 2, 12, 16)
    if paged:
        table = torch.tensor([[2, 0, 5], [4, 1, 3]], dtype=torch.int32, device=device)
        shape = (6, 2, 4, 16)
    caches = [torch.full(shape, 7.0, dtype=dtype, device=device) for _ in range(2)]
    given = (q, k, v, *caches, *tables)
    if by_ends:  # positions are then places
        out = tilewise.rope_into_cache(*given, cache_ends=starts + 5, page_table=table)
    else:
        out = tilewise.rope_into_cache(*given, positions, cache_starts=starts, page_table=table)
    expected_q, expected_k = tilewise.apply_rope(q, k, *tables, positions)
    assert torch.equal(out, expected_q)
    for cache, rows in zip(caches, (expected_k, v), strict=True):
        if table is not None:
            cache = cache[table.long()].transpose(1, 2).flatten(2, 3)
        for b, start in enumerate((3, 0)):
            assert torch.equal(cache[b, :, start : start + 5], rows[b])
            left = torch.cat([cache[b, :, :start], cache[b, :, start + 5 :]], 1)
            assert torch.equal(left, torch.full_like(left, 7.0))


def test_gradients_are_those_of_differences() -> None:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    x, w, g, d = numbers(2, 3, 4), numbers(5, 4), numbers(5, 4), numbers(4, 5)
    bias, residual, scale = numbers(5), numbers(2, 3, 4), numbers(4)
    for activation in ("gelu", "gelu_tanh", "silu"):
        torch.autograd.gradcheck(
            lambda x, w, g, b, a=activation: tilewise.linear(x, w, gate=g, gate_bias=b, activation=a),
            (x, w, g, bias),
        )
        torch.autograd.gradcheck(
            lambda x, w, d, b, r, a=activation: tilewise.ffn(x, w, d, up_bias=b, residual=r, activation=a),
            (x, w, d, bias, residual),
        )
        torch.autograd.gradcheck(
            lambda x, w, d, g, a=activation: tilewise.ffn(x, w, d, gate=g, activation=a, keep_products=True),
            (x, w, d, g),
        )
    torch.autograd.gradcheck(lambda x, w, r: tilewise.rms_norm(x, w, residual=r), (x, scale, residual))
    torch.autograd.gradcheck(lambda x, w, b: tilewise.layer_norm(x, w, b), (x, scale, scale))
    tables = [t.double() for t in tilewise.rope_tables(3, 4)]
    torch.autograd.gradcheck(
        lambda q: tilewise.apply_rope(q, None, *tables, interleaved=True), (numbers(1, 2, 3, 4),)
    )
    # A product's gradient is made of products, which have gradients of their own.
    torch.autograd.gradgradcheck(lambda x, w: tilewise.linear(x, w, activation="gelu"), (x, w))


def opcheck_samples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    ops = torch.ops.tilewise
    x, w, d, b = leaf(6, 8), leaf(5, 8), leaf(8, 5), leaf(5)
    q, k = leaf(1, 2, 3, 8), leaf(1, 1, 3, 8)
    cos, sin = tilewise.rope_tables(9, 6)
    caches = (torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))
    plain = [t.detach() for t in (q, k)]
    return {
        "gemm": (ops.gemm.default, (x, w, b)),
        "gated gemm": (ops.gemm.default, (x, w, b, leaf(5, 8), None, leaf(6, 5), "silu")),
        "ffn": (ops.ffn_forward.default, (x, w, d, None, b)),
        "gated ffn": (ops.ffn_forward.default, (x, w, d, leaf(5, 8), None, None, None, leaf(6, 8), "silu")),
        "ffn, products kept": (ops.ffn_forward_kept.default, (x, w, d, None, b)),
        "gated ffn, products kept": (
            ops.ffn_forward_kept.default,
            (x, w, d, leaf(5, 8), None, None, None, leaf(6, 8), "silu"),
        ),
        "rms norm": (ops.norm_forward.default, (x, leaf(6, 8), leaf(8), None, 1e-6, False)),
        "layer norm": (ops.norm_forward.default, (x, None, leaf(8), leaf(8), 1e-6, True)),
        "rope": (ops.rope.default, (q, k, cos, sin, torch.tensor([[1, 5, 2]]))),
        "rope into cache": (ops.rope_into_cache.default, (*plain, plain[1], *caches, cos, sin)),
    }


@pytest.mark.parametrize("name", opcheck_samples())
def test_opcheck(name: str) -> None:
    operator, arguments = opcheck_samples()[name]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=checks)


def test_a_transposed_weight_is_read_where_it_lies() -> None:
    x, w = torch.randn(50, 12), torch.randn(12, 30)
    torch.testing.assert_close(tilewise.linear(x, w.t()), x @ w)
    both = torch.randn(60, 12)
    torch.testing.assert_close(
        tilewise.linear(x, both[30:], gate=both[:30], activation="silu"),
        F.silu(x @ both[:30].T) * (x @ both[30:].T),
    )


def test_autocast_casts_products_and_leaves_norms() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert tilewise.linear(x, w).dtype == torch.bfloat16
        assert tilewise.ffn(x, w, w).dtype == torch.bfloat16
        assert tilewise.rms_norm(x).dtype == torch.float32


def into_cache(x: Tensor, rows: int, **where: int) -> Tensor:
    """Two tokens of one head into a cache of six, with tables of so many rows."""
    x = x.view(1, 1, 2, 8)
    caches = [torch.zeros(1, 1, 6, 8) for _ in range(2)]
    given = {f"cache_{name}": torch.tensor([at], dtype=torch.int32) for name, at in where.items()}
    return tilewise.rope_into_cache(x, x, x, *caches, *tilewise.rope_tables(rows, 8), **given)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: tilewise.linear(x, torch.randn(3, 7)), "weight: expected rank 2 [N, K] with K 8"),
        (lambda x: tilewise.linear(x, torch.randn(3, 8).double()), "weight: expected f32, got f64"),
        (lambda x: tilewise.linear(x, torch.randn(3, 8), activation="tanh"), "activation: expected none"),
        (
            lambda x: tilewise.linear(x, torch.randn(3, 8), residual=x),
            "residual: expected [2, 3], got [2, 8]",
        ),
        (lambda x: tilewise.linear(x, torch.randn(3, 8), kernel="best"), "kernel: expected one of auto"),
        (lambda x: tilewise.ffn(x, torch.randn(5, 8), torch.randn(8, 4)), "down: expected rank 2 [O, F]"),
        (lambda x: tilewise.rms_norm(x, torch.randn(7)), "weight: expected [D] = [8], got f32[7]"),
        (lambda x: tilewise.rms_norm(x, eps=-1.0), "eps: expected a finite number, 0 or above, got -1"),
        (
            lambda x: tilewise.apply_rope(x.view(1, 1, 2, 8), None, *tilewise.rope_tables(1, 8)),
            "cos: expected a table of at least 2 positions",
        ),
        (lambda x: into_cache(x, 8, starts=0, ends=2), "cache_ends: expected none with cache_starts"),
        (lambda x: into_cache(x, 8, ends=1), "cache_ends: expected room for 2 tokens from position -1"),
        (lambda x: into_cache(x, 3, ends=4), "cos: expected a table of at least 4 positions"),
    ],
)
def test_bad_input_is_named(call: Callable[[Tensor], Any], text: str) -> None:
    with pytest.raises(tilewise.InvalidArgument) as error:
        call(torch.randn(2, 8))
    assert text in str(error.value)


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match="weight: expected Tensor, got int"):
        tilewise.linear(torch.randn(2, 8), 3)


def test_angles_with_a_gradient_are_refused() -> None:
    cos, sin = tilewise.rope_tables(3, 8)
    with pytest.raises(tilewise.Unsupported, match="cos: no gradient"):
        tilewise.apply_rope(leaf(1, 1, 3, 8), None, cos.requires_grad_(), sin)


@pytest.mark.parametrize(
    "call",
    [
        tilewise.rms_norm,
        lambda x: tilewise.layer_norm(x, torch.ones(8), torch.zeros(8)),
        lambda x: tilewise.ffn(x, torch.ones(5, 8), torch.ones(8, 5)),
    ],
    ids=["rms_norm", "layer_norm", "ffn"],
)
def test_a_second_derivative_is_refused_and_not_zero(call: Callable[[Tensor], Tensor]) -> None:
    x = leaf(2, 8)
    (first,) = torch.autograd.grad(call(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(tilewise.Unsupported, match="this gradient cannot be differentiated again"):
        torch.autograd.grad(first.sum(), x)


def test_products_and_angles_have_a_second_derivative() -> None:
    x, w = leaf(3, 8, dtype=torch.float64), leaf(5, 8, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(tilewise.linear, (x, w))
    cos, sin = (table.double() for table in tilewise.rope_tables(3, 8))
    turned = leaf(1, 1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: tilewise.apply_rope(x, None, cos, sin), (turned,))


def test_explain_walks_the_list() -> None:
    text = torch.ops.tilewise.explain_ffn(torch.randn(2, 8), torch.randn(5, 8), torch.randn(8, 5))
    assert text.startswith("ffn forward f32 M2 E8 F5 O8 on cpu, gelu")
    assert "chunked: chosen" in text and "reference: able" in text


@pytest.mark.parametrize("module", ["functional", "nn.blocks", "nn.configs", "nn.layer"])
def test_examples_in_the_documentation(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"tilewise.{module}"))
    assert found.failed == 0 and found.attempted > 0


def test_the_package_has_all_functions() -> None:
    names = ("linear", "ffn", "rms_norm", "layer_norm", "apply_rope", "rope_into_cache", "rope_tables")
    assert all(getattr(tilewise, name) is getattr(functional, name) for name in names)
