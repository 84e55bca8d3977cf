"""tilewise.attention and its kin against the float64 reference and PyTorch's own attention."""

from __future__ import annotations

import doctest
import functools
import importlib
import itertools
import pickle
from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import (
    DV,
    HKV,
    HQ,
    SK,
    SQ,
    B,
    D,
    assert_within_contract,
    check_against,
    gradients,
    leaf,
    lengths,
    rows,
)
from tilewise import attention, attention_decode, attention_varlen, merge_states, reference
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

TYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPE_IDS = ["f32", "f16", "bf16"]
dtypes = pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)


def both(**options: Any) -> dict[str, Any]:
    """Ours and the reference with the same options."""
    options = {"enable_gqa": True, "return_lse": True} | options
    return {
        "ours": functools.partial(attention, **options),
        "reference": functools.partial(reference.attention, **options),
    }


def blocks(device: Any, *shape: int) -> tilewise.BlockMask:
    return tilewise.BlockMask.from_dense(torch.rand(shape, device=device) < 0.2, block_size=(16, 8))


OPTIONS: dict[str, Any] = {
    "plain": lambda _: {},
    "scale": lambda _: {"scale": 0.25},
    "causal": lambda _: {"is_causal": True},
    "causal bottom right": lambda _: {"is_causal": True, "alignment": "bottom_right"},
    "window": lambda _: {"window": (7, 3)},
    "window bottom right": lambda _: {"window": (7, None), "alignment": "bottom_right", "is_causal": True},
    "softcap": lambda _: {"softcap": 2.0},
    "alibi": lambda d: {"alibi_slopes": torch.rand(HQ, device=d)},
    "alibi per entry": lambda d: {"alibi_slopes": torch.rand(B, HQ, device=d)},
    "boolean mask": lambda d: {"attn_mask": torch.rand(B, 1, SQ, SK, device=d) < 0.5},
    "padding mask": lambda d: {
        "attn_mask": torch.arange(SK, device=d) < torch.tensor([[[[20]]], [[[0]]]], device=d)
    },
    "block mask": lambda d: {"block_mask": blocks(d, B, HQ, SQ, SK)},
    "block mask broadcast": lambda d: {"block_mask": blocks(d, 1, 1, SQ, SK)},
    "dropout": lambda _: {"dropout_p": 0.3},
    "all": lambda d: {
        "is_causal": True,
        "alignment": "bottom_right",
        "window": (30, 5),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(HQ, device=d),
        "block_mask": blocks(d, 1, HQ, SQ, SK),
        "dropout_p": 0.2,
        "scale": 0.5,
    },
}


# Exactness


@dtypes
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_are_within_the_contract(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    check_against(**both(**OPTIONS[name](device)), rows=rows(dtype, device), extra={})


@dtypes
@pytest.mark.parametrize("shape", [(SK,), (SQ, 1), (1, HQ, 1, SK), (B, 1, SQ, SK), (B, HQ, SQ, SK), ()])
@pytest.mark.parametrize("wide", [False, True], ids=["own type", "f32"])
def test_an_additive_mask_of_any_shape_has_its_gradient(
    shape: tuple[int, ...], wide: bool, dtype: torch.dtype, device: torch.device
) -> None:
    mask = leaf(*shape, dtype=torch.float32 if wide else dtype, device=device)
    check_against(**both(), rows=rows(dtype, device), extra={"attn_mask": mask})


@dtypes
def test_sinks_have_their_gradient(dtype: torch.dtype, device: torch.device) -> None:
    sinks = leaf(HQ, device=device)
    check_against(**both(is_causal=True), rows=rows(dtype, device), extra={"sinks": sinks})


@dtypes
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0}, {"window": (4, 2)}], ids=str)
def test_a_learned_scale_has_its_gradient(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    logit_scale = torch.rand(HQ, device=device).mul(3).requires_grad_()
    check_against(**both(**options), rows=rows(dtype, device), extra={"logit_scale": logit_scale})


def test_a_learned_scale_of_zero_still_has_a_gradient(device: torch.device) -> None:
    q, k, v = rows(device=device)
    logit_scale = torch.ones(HQ, device=device)
    logit_scale[0] = 0
    logit_scale.requires_grad_()
    grads = [
        torch.autograd.grad(
            call(q, k, v, enable_gqa=True, logit_scale=logit_scale).pow(2).sum(), logit_scale
        )[0]
        for call in (attention, reference.attention)
    ]
    assert grads[0][0] != 0
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_a_learned_scale_is_compiled_and_may_be_all_that_is_trained() -> None:
    q, k, v = (x.detach() for x in rows())
    logit_scale = torch.rand(HQ, requires_grad=True)

    def loss(logit_scale: Tensor) -> Tensor:
        return attention(q, k, v, enable_gqa=True, logit_scale=logit_scale).pow(2).sum()

    (eager,) = torch.autograd.grad(loss(logit_scale), logit_scale)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (traced,) = torch.autograd.grad(compiled(logit_scale), logit_scale)
    torch.testing.assert_close(traced, eager)


def test_a_learned_scale_is_that_of_its_query_head(device: torch.device) -> None:
    q, k, v = rows(device=device)
    logit_scale = torch.rand(HQ, device=device) * 3
    out = attention(q, k, v, enable_gqa=True, logit_scale=logit_scale)
    same = attention(q * logit_scale[:, None, None], k, v, enable_gqa=True)
    torch.testing.assert_close(out, same, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["simd", "reference"])
@pytest.mark.parametrize(
    "sizes", [{"sq": 0}, {"sk": 0}, {"b": 0}, {"sq": 1}, {"d": 1, "dv": 1}, {"d": 257, "dv": 3}]
)
def test_every_cpu_kernel_takes_odd_sizes(kernel: str, sizes: dict[str, int]) -> None:
    check_against(**both(kernel=kernel), rows=rows(**sizes), extra={})


def test_rows_that_see_nothing_are_zero_and_have_no_gradient(device: torch.device) -> None:
    q, k, v = rows(device=device)
    mask = torch.ones(SQ, SK, dtype=torch.bool, device=device)
    mask[3:5] = False
    out, lse = attention(q, k, v, mask, enable_gqa=True, return_lse=True)
    assert (out[:, :, 3:5] == 0).all() and (lse[:, :, 3:5] == -torch.inf).all()
    found = gradients([out], [q, k, v], [torch.ones_like(out)])
    assert (found[0][:, :, 3:5] == 0).all() and all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("causal", [False, True])
@dtypes
def test_plain_attention_matches_torchs_math_path(
    causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = (x.detach() for x in rows(dtype, device))
    with sdpa_kernel(SDPBackend.MATH):
        math = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        exact = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
        )
    assert_within_contract("out", attention(q, k, v, is_causal=causal, enable_gqa=True), exact, math)
    torch.testing.assert_close(reference.attention(q, k, v, is_causal=causal), exact, atol=1e-13, rtol=1e-13)


# Strides


@dtypes
@pytest.mark.parametrize(
    "layout", ["heads inside", "packed qkv", "expanded", "last dimension strided", "sliced"]
)
def test_any_strides_give_the_same(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    base = leaf(B, SQ, 3, HQ, D, dtype=dtype, device=device, grad=False)
    q, k, v = (base[:, :, n].transpose(1, 2) for n in range(3))
    if layout == "heads inside":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "expanded":
        k, v = (x[:1, :1].expand(B, HQ, SQ, D) for x in (k, v))
    elif layout == "last dimension strided":
        q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
    elif layout == "sliced":
        q, k, v = (x[:, :, 2::2, 1:] for x in (q, k, v))
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(attention(q, k, v), expected)
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, is_causal=True)
    others = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = attention(*others, is_causal=True)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), others), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_output_is_laid_out_as_the_query_is() -> None:
    x = torch.randn(B, SQ, HQ, D).transpose(1, 2)
    assert attention(x, x, x).transpose(1, 2).is_contiguous()
    x = x.contiguous()
    assert attention(x, x, x).is_contiguous()


# PyTorch's own function


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 2), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_takes_any_leading_dimensions(leading: tuple[int, ...], masked: bool) -> None:
    q, k, v = (torch.randn(*leading, n, 8) for n in (4, 6, 6))
    mask = torch.rand(*leading, 4, 6) < 0.7 if masked else None
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(tilewise.scaled_dot_product_attention(q, k, v, mask), expected)


def test_sdpa_broadcasts_as_torch_does() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(1, 4, 6, 8), torch.randn(2, 1, 6, 8)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(tilewise.scaled_dot_product_attention(q, k, v), expected)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_sdpa_knows_torchs_causal_biases(bias: Any) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    expected = F.scaled_dot_product_attention(q, k, v, bias(5, 9))
    torch.testing.assert_close(tilewise.scaled_dot_product_attention(q, k, v, bias(5, 9)), expected)


# Other layouts


VARLEN_OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (3, 1), "softcap": 3.0, "scale": 0.5},
}


@dtypes
@pytest.mark.parametrize("name", VARLEN_OPTIONS)
def test_varlen_is_attention_within_each_sequence(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    q = leaf(40, HQ, D, dtype=dtype, device=device)
    k = leaf(50, HKV, D, dtype=dtype, device=device)
    v = leaf(50, HKV, DV, dtype=dtype, device=device)
    cu_q, cu_k = lengths(0, 13, 13, 38, device=device), lengths(0, 20, 24, 50, device=device)
    options = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": 25,
        "max_seqlen_k": 26,
        "return_lse": True,
        "alibi_slopes": torch.rand(3, HQ, device=device),
    } | VARLEN_OPTIONS[name]
    check_against(
        functools.partial(attention_varlen, **options),
        functools.partial(reference.attention_varlen, **options),
        (q, k, v),
        {"sinks": leaf(HQ, device=device), "logit_scale": leaf(HQ, device=device)},
    )


@dtypes
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("page", [None, 1, 7, 16])
@pytest.mark.parametrize("dims", [(D, DV), (64, 64)])
def test_decode_reads_the_keys_in_use(
    dims: tuple[int, int], length: int, page: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    q = leaf(3, HQ, length, dims[0], dtype=dtype, device=device, grad=False)
    table = None
    shape = (3, HKV, 48)
    if page is not None:
        count = -(-48 // page)
        table = torch.randperm(3 * count, dtype=torch.int32).view(3, count).to(device)
        shape = (3 * count, HKV, page)
    k, v = (leaf(*shape, d, dtype=dtype, device=device, grad=False) for d in dims)
    used = lengths(5, 48, 17, device=device)
    for options in ({}, {"is_causal": True}, {"window": (4, None), "sinks": torch.randn(HQ, device=device)}):
        out, lse = attention_decode(q, k, v, used, table, return_lse=True, **options)
        exact, exact_lse = reference.attention_decode(q, k, v, used, table, return_lse=True, **options)
        math, math_lse = reference.attention_decode(
            q, k, v, used, table, return_lse=True, dtype=torch.float32, **options
        )
        assert_within_contract("out", out, exact, math)
        assert_within_contract("lse", lse, exact_lse, math_lse)


def test_decode_with_a_dense_cache_has_a_gradient() -> None:
    q, k, v = rows(sq=2)
    options = {"cache_seqlens": lengths(9, 53), "is_causal": True, "return_lse": True}
    check_against(
        functools.partial(attention_decode, **options),
        functools.partial(reference.attention_decode, **options),
        (q, k, v),
        {},
    )


def test_a_paged_cache_has_no_gradient_and_says_so() -> None:
    q, k, v = leaf(1, 2, 1, 8), leaf(4, 2, 4, 8), leaf(4, 2, 4, 8)
    out = attention_decode(q, k, v, lengths(7), lengths(2, 0).view(1, 2))
    with pytest.raises(RuntimeError, match="paged keys have no backward"):
        out.sum().backward()


# Block masks


@pytest.mark.parametrize("size", [16, 32])
def test_torchs_block_mask_keeps_its_meaning(size: int, device: torch.device) -> None:
    document = torch.randint(0, 3, (B, 75), device=device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[b, q] == document[b, k])

    mask = create_block_mask(mask_mod, B, None, 75, 75, device=str(device), BLOCK_SIZE=size)
    q, k, v = rows(sq=75, sk=75, device=device)
    i = torch.arange(75, device=device)
    dense = (i[:, None] >= i) & (document[:, None, :, None] == document[:, None, None, :])
    expected, lse = reference.attention(q, k, v, dense, return_lse=True)
    out, ours = attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(ours.double(), lse, atol=2e-6, rtol=1e-5)


def test_a_block_mask_stores_equal_tiles_once_and_survives_pickling() -> None:
    mask = tilewise.BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 1000, 1000, block_size=64)
    assert mask.tiles is not None and mask.tiles.shape[0] <= 2
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.to_dense(1000, 1000), torch.ones(1000, 1000).tril().bool()[None, None])


# States


def test_merged_parts_are_the_whole_with_its_gradient(device: torch.device) -> None:
    q, k, v = rows(device=device)

    def parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cuts = (slice(0, 20), slice(20, 21), slice(21, SK), slice(0, 0))
        states = [attention(q, k[:, :, s], v[:, :, s], enable_gqa=True, return_lse=True) for s in cuts]
        return merge_states(*zip(*states, strict=True))

    check_against(parts, functools.partial(reference.attention, return_lse=True), (q, k, v), {})


def test_merging_parts_that_see_nothing_gives_nothing() -> None:
    out, lse = merge_states([torch.zeros(1, 2, 3, 4)] * 2, [torch.full((1, 2, 3), -torch.inf)] * 2)
    assert (out == 0).all() and (lse == -torch.inf).all()


# Gradients


@pytest.mark.parametrize("asked", list(itertools.product([False, True], repeat=6)))
def test_only_the_gradients_asked_for_are_given(asked: tuple[bool, ...]) -> None:
    tensors = [*rows(), leaf(SQ, SK), leaf(HQ), leaf(HQ)]
    for tensor, ask in zip(tensors, asked, strict=True):
        tensor.requires_grad_(ask)
    q, k, v, mask, sinks, logit_scale = tensors
    out = attention(q, k, v, mask, enable_gqa=True, sinks=sinks, logit_scale=logit_scale)
    assert out.requires_grad == any(asked)
    if any(asked):
        out.sum().backward()
    assert [x.grad is not None for x in tensors] == list(asked)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "softcap": 2.0},
        {"window": (2, 1), "alignment": "bottom_right"},
        {"dropout_p": 0.4},
    ],
    ids=str,
)
def test_gradcheck(options: dict[str, Any]) -> None:
    tensors = [leaf(1, 4, 3, 2), leaf(1, 2, 5, 2), leaf(1, 2, 5, 3), leaf(4, 3, 5), leaf(4), leaf(4)]
    tensors = [x.detach().double().requires_grad_() for x in tensors]

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, logit_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        heads = {"sinks": sinks, "logit_scale": logit_scale}
        return attention(q, k, v, mask, enable_gqa=True, return_lse=True, **heads, **options)

    assert torch.autograd.gradcheck(attend, tensors)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = rows()
    (dq,) = torch.autograd.grad(attention(q, k, v, enable_gqa=True).sum(), q, create_graph=True)
    with pytest.raises(tilewise.Unsupported, match="no second derivative"):
        dq.sum().backward()
    with pytest.raises(Exception, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: attention(y, y, y).sum())(x).sum())(
            torch.randn(1, 1, 4, 8)
        )


def test_a_derivative_in_forward_mode_is_refused() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(tilewise.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda y: attention(y, y, y), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(tilewise.Unsupported, match="forward-mode"):
        attention(forward_ad.make_dual(x, x), x, x)


def test_slopes_that_want_a_gradient_are_refused() -> None:
    q, k, v = rows()
    with pytest.raises(tilewise.Unsupported, match="alibi_slopes"):
        attention(q, k, v, enable_gqa=True, alibi_slopes=leaf(HQ))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device at most")
def test_every_device_computes_the_same_whichever_is_the_current_one() -> None:
    q, k, v = rows(device=torch.device("cuda", 0))
    expected = attention(q, k, v, enable_gqa=True)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    for index in range(1, torch.cuda.device_count()):
        there = [x.detach().to(f"cuda:{index}").requires_grad_() for x in (q, k, v)]
        with torch.cuda.device(0):
            out = attention(*there, enable_gqa=True)
            found = torch.autograd.grad(out.sum(), there)
        assert out.device.index == index
        for x, y in zip((out, *found), (expected, *gradients), strict=True):
            assert torch.allclose(x.cpu(), y.cpu(), atol=1e-5)


@pytest.mark.parametrize("switch", ["argument", "torch"])
def test_deterministic_gradients_repeat_bit_by_bit(switch: str, device: torch.device) -> None:
    q, k, v = rows(sq=300, sk=300, device=device)
    torch.use_deterministic_algorithms(switch == "torch")
    try:
        results = [
            torch.autograd.grad(
                attention(q, k, v, enable_gqa=True, deterministic=switch == "argument").sum(), (q, k, v)
            )
            for _ in range(3)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
def test_strict_precision_is_what_cpus_have_anyway(dtype: torch.dtype) -> None:
    q, k, v = rows(dtype=dtype)
    results = [
        (out, *torch.autograd.grad(out.sum(), (q, k, v)))
        for out in (attention(q, k, v, enable_gqa=True, precision=x) for x in ("standard", "strict"))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_precision_is_explained_where_it_changes_something() -> None:
    q, k, v = rows(dtype=torch.bfloat16)
    assert tilewise.explain(q, k, v, enable_gqa=True, precision="strict").splitlines()[0].endswith(", strict")
    assert "strict" not in tilewise.explain(q, k, v, enable_gqa=True).splitlines()[0]
    x = leaf(1, 2, 8, 8)
    assert "strict" not in tilewise.explain(x, x, x, precision="strict").splitlines()[0]


@pytest.mark.parametrize("wrong", ["exact", "", None, 1, b"strict"])
def test_precision_is_standard_or_strict(wrong: Any) -> None:
    x = leaf(1, 2, 8, 8)
    for attend in (attention, tilewise.explain):
        with pytest.raises((tilewise.InvalidArgument, TypeError), match="precision: expected"):
            attend(x, x, x, precision=wrong)


# Words


def test_explain_walks_the_kernels_of_both_passes() -> None:
    q, k, v = rows()
    text = tilewise.explain(q, k, v, enable_gqa=True, dropout_p=0.5)
    assert text.count("simd: chosen") == 2 and "backward f32 dense" in text and "dropout" in text
    text = tilewise.explain(q.double(), k.double(), v.double(), enable_gqa=True)
    assert "simd: cannot: needs f32, f16 or bf16, got f64" in text and "reference: chosen" in text
    assert tilewise.kernels()[-1] == "reference"


def test_explain_draws_no_random_numbers() -> None:
    q, k, v = rows()
    state = torch.random.get_rng_state()
    tilewise.explain(q, k, v, enable_gqa=True, dropout_p=0.5)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "module", ["attention", "block_mask", "reference"], ids=lambda name: f"tilewise.{name}"
)
def test_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"tilewise.{module}"))
    assert found.failed == 0 and found.attempted > 0
