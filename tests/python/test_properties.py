"""Random problems: attention against the reference, and the reference against PyTorch's math path."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import gradients
from contract import assert_twice, moved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilewise import attention, attention_decode, attention_varlen, merge_states, reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The seed of a test is its own, so a failing example is found again; no file is written for it.
few = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
heads = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda x: (x[0] * x[1], x[1]))  # (Hq, Hkv)
lengths = st.integers(0, 70) | st.sampled_from([16, 64])
dims = st.integers(1, 40) | st.sampled_from([64, 96])
seeds = st.integers(0, 2**31)
side = st.none() | st.integers(0, 80)
windows = st.none() | st.tuples(side, side)
scales = st.none() | st.floats(-2, 2, width=32)
softcaps = st.just(0.0) | st.floats(0.5, 50, width=32)
alignments = st.sampled_from(["top_left", "bottom_right"])


ENOUGH = 128  # values, for the root mean square of their errors to be no matter of luck


def enough(batch: int, *extents: int) -> int:
    """A batch, or sequences, of which `extents` make enough values; none where there are none."""
    each = math.prod(extents)
    return max(batch, -(-ENOUGH // each)) if batch and each else batch


def draw_rows(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def scaled_like_torch(attend: Any) -> Any:
    """A function of the reference with √scale on query and key each, as PyTorch's math path has it."""

    def call(query: Tensor, key: Tensor, *rest: Any, scale: float | None = None, **options: Any) -> Any:
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        root = math.sqrt(abs(scale))
        return attend(query * math.copysign(root, scale), key * root, *rest, scale=1.0, **options)

    return call


def check_both_passes(
    ours: Any, theirs: Any, tensors: list[Tensor], extra: dict[str, Tensor], seed: int
) -> None:
    """Outputs and gradients of `ours` against those of the reference in float64."""
    names = ["out", "lse", "gradient of query", "gradient of key", "gradient of value", *extra]

    def run(attend: Any, values: list[Tensor], wide: torch.dtype | None, **options: Any) -> dict[str, Tensor]:
        leaves = [x.detach().to(wide or x.dtype).requires_grad_() for x in values]
        torch.manual_seed(seed)  # for dropout
        named = dict(zip(extra, leaves[3:], strict=True))
        out, lse = attend(*leaves[:3], **named, **options)
        cotangents = draw_rows(seed + 2, tuple(out.shape), tuple(lse.shape), dtype=tensors[0].dtype)
        cotangents[1] = torch.where(lse.isinf(), 0.0, cotangents[1]).detach()
        results = (out, lse, *gradients((out, lse), leaves, cotangents))
        return {name: x.detach() for name, x in zip(names, results, strict=True)}

    def draw(n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        values = [moved(x, n) if n else x for x in (*tensors, *extra.values())]
        exact = run(theirs, values, torch.float64, dtype=torch.float64)
        return exact, run(scaled_like_torch(theirs), values, torch.float32, dtype=torch.float32)

    assert_twice(run(ours, [*tensors, *extra.values()], None), draw)


def checked(options: dict[str, Any], tensors: list[Tensor], extra: dict[str, Tensor], seed: int) -> None:
    options = {"enable_gqa": True, "return_lse": True} | options
    ours, theirs = (functools.partial(attend, **options) for attend in (attention, reference.attention))
    check_both_passes(ours, theirs, tensors, extra, seed)


@few(max_examples=60)
@given(
    types,
    st.integers(0, 3),
    heads,
    lengths,
    lengths,
    dims,
    dims,
    st.booleans(),
    alignments,
    windows,
    scales,
    softcaps,
    seeds,
)
def test_attention_is_near_the_reference(
    dtype: torch.dtype,
    batch: int,
    heads: tuple[int, int],
    length_q: int,
    length_k: int,
    dim: int,
    dim_v: int,
    is_causal: bool,
    alignment: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float,
    seed: int,
) -> None:
    heads_q, heads_kv = heads
    batch = enough(batch, heads_q, length_q)
    tensors = draw_rows(
        seed,
        (batch, heads_q, length_q, dim),
        (batch, heads_kv, length_k, dim),
        (batch, heads_kv, length_k, dim_v),
        dtype=dtype,
    )
    options = {
        "is_causal": is_causal,
        "alignment": alignment,
        "window": window,
        "scale": scale,
        "softcap": softcap,
    }
    checked(options, tensors, {}, seed)


@few(max_examples=50)
@given(
    types,
    st.tuples(*(st.booleans() for _ in range(4))),
    st.integers(0, 4),
    st.sampled_from(["boolean", "additive", "f32", "hiding"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    seeds,
)
def test_masks_sinks_and_dropout_are_near_the_reference(
    dtype: torch.dtype,
    broadcast: tuple[bool, ...],
    rank: int,
    kind: str,
    sinks: bool,
    alibi: bool,
    dropout_p: float,
    seed: int,
) -> None:
    shape = (2, 32, 9, 35)
    tensors = draw_rows(seed, (2, 32, 9, 12), (2, 8, 35, 12), (2, 8, 35, 20), dtype=dtype)
    extents = [1 if one else extent for one, extent in zip(broadcast, shape, strict=True)][4 - rank :]
    mask, sink, slopes = draw_rows(seed + 1, tuple(extents), (32,), (2, 32))
    options: dict[str, Any] = {"dropout_p": dropout_p, "alibi_slopes": slopes.abs() if alibi else None}
    extra = {"sinks": sink} if sinks else {}
    if kind == "boolean":
        options["attn_mask"] = mask > -0.5
    elif kind == "hiding":
        options["attn_mask"] = torch.where(mask > -0.5, mask, -torch.inf).to(dtype)
    else:  # of few values the gradient is left to other tests
        where = extra if mask.numel() >= 32 else options
        where["attn_mask"] = mask if kind == "f32" else mask.to(dtype)
    checked(options, tensors, extra, seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_the_gradient_of_a_mask_that_is_constant_along_rows_is_within_the_contract(
    dtype: torch.dtype,
) -> None:
    """It is zero, as such a mask changes nothing. PyTorch's math path is off by 3e-7 here, not by 5e-4."""
    q, k, v, mask, cotangent = draw_rows(
        0, (2, 4, 19, 12), (2, 4, 35, 12), (2, 4, 35, 20), (19, 1), (2, 4, 19, 20), dtype=dtype
    )
    mask.requires_grad_()
    (found,) = torch.autograd.grad(attention(q, k, v, mask), mask, cotangent)
    with sdpa_kernel(SDPBackend.MATH):
        (theirs,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask), mask, cotangent)
    assert found.double().square().mean() <= 4 * theirs.double().square().mean()


@few(max_examples=40)
@given(
    st.integers(1, 3),
    heads,
    st.integers(1, 40),
    st.integers(1, 40),
    dims,
    dims,
    st.sampled_from("ncba"),
    scales,
    seeds,
)
def test_the_reference_is_torchs_math_path(
    batch: int,
    heads: tuple[int, int],
    length_q: int,
    length_k: int,
    dim: int,
    dim_v: int,
    hides: str,
    scale: float | None,
    seed: int,
) -> None:
    heads_q, heads_kv = heads
    q, k, v, mask = (
        x.double().requires_grad_()
        for x in draw_rows(
            seed,
            (batch, heads_q, length_q, dim),
            (batch, heads_kv, length_k, dim),
            (batch, heads_kv, length_k, dim_v),
            (batch, 1, length_q, length_k),
        )
    )
    visible = mask.detach() > 0
    visible[..., 0] = True  # what sees nothing is NaN or not in torch, by version
    chosen = {"n": None, "c": None, "b": visible, "a": mask}[hides]
    options = {"attn_mask": chosen, "is_causal": hides == "c", "scale": scale, "enable_gqa": True}
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
    out = reference.attention(q, k, v, **options)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    leaves = [q, k, v, mask] if hides == "a" else [q, k, v]
    cotangent = torch.ones_like(out)
    for a, b in zip(*(torch.autograd.grad(x, leaves, cotangent) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@few(max_examples=30)
@given(
    types,
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
    heads,
    st.booleans(),
    alignments,
    windows,
    st.integers(0, 3),
    seeds,
)
def test_packed_sequences_are_near_the_reference(
    dtype: torch.dtype,
    sizes: list[tuple[int, int]],
    heads: tuple[int, int],
    is_causal: bool,
    alignment: str,
    window: tuple[int | None, int | None] | None,
    unused: int,
    seed: int,
) -> None:
    sizes = sizes * enough(1, sum(x[0] for x in sizes), heads[0])
    ends = [torch.tensor([0, *(x[n] for x in sizes)]).cumsum(0).to(torch.int32) for n in (0, 1)]
    heads_q, heads_kv = heads
    total_q, total_k = (int(x[-1]) for x in ends)
    tensors = draw_rows(
        seed, (total_q + unused, heads_q, 16), (total_k, heads_kv, 16), (total_k, heads_kv, 10), dtype=dtype
    )
    options = {
        "cu_seqlens_q": ends[0],
        "cu_seqlens_k": ends[1],
        "max_seqlen_q": max(x[0] for x in sizes),
        "max_seqlen_k": max(x[1] for x in sizes),
        "is_causal": is_causal,
        "alignment": alignment,
        "window": window,
        "return_lse": True,
    }
    check_both_passes(
        functools.partial(attention_varlen, **options),
        functools.partial(reference.attention_varlen, **options),
        tensors,
        {},
        seed,
    )


@few(max_examples=30)
@given(
    types,
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    heads,
    st.integers(1, 4),
    st.none() | st.integers(1, 17),
    st.booleans(),
    windows,
    seeds,
)
def test_caches_are_near_the_reference(
    dtype: torch.dtype,
    used: list[int],
    heads: tuple[int, int],
    length: int,
    page: int | None,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    seed: int,
) -> None:
    used = used * enough(1, len(used), heads[0], length)
    batch, (heads_q, heads_kv) = len(used), heads
    table, first, each = None, batch, 40
    if page is not None:
        pages = -(-40 // page)
        table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed))
        table, first, each = table.to(torch.int32).view(batch, pages), batch * pages, page
    tensors = draw_rows(
        seed,
        (batch, heads_q, length, 16),
        (first, heads_kv, each, 16),
        (first, heads_kv, each, 10),
        dtype=dtype,
    )
    options = {"is_causal": is_causal, "window": window, "return_lse": True}

    def run(attend: Any, values: list[Tensor], **more: Any) -> dict[str, Tensor]:
        arguments = (*values, torch.tensor(used, dtype=torch.int32), table)
        return dict(zip(("out", "lse"), attend(*arguments, **options, **more), strict=True))

    def draw(n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        values = [moved(x, n) if n else x for x in tensors]
        exact = run(reference.attention_decode, values)
        widened = [x.float() for x in values]
        plain = scaled_like_torch(reference.attention_decode)
        return exact, run(plain, widened, dtype=torch.float32)

    assert_twice(run(attention_decode, tensors), draw)


@few(max_examples=30)
@given(types, st.lists(st.integers(0, 20), min_size=1, max_size=5), st.booleans(), seeds)
def test_parts_merge_to_the_whole(dtype: torch.dtype, sizes: list[int], masked: bool, seed: int) -> None:
    total = sum(sizes)
    q, k, v = draw_rows(seed, (2, 3, 9, 16), (2, 3, total, 16), (2, 3, total, 8), dtype=dtype)
    visible = torch.rand(9, total, generator=torch.Generator().manual_seed(seed)) < 0.4 if masked else None
    parts, start = [], 0
    for size in sizes:
        keys = slice(start, start := start + size)
        mask = None if visible is None else visible[:, keys]
        parts.append(attention(q, k[:, :, keys], v[:, :, keys], mask, return_lse=True))
    out, lse = merge_states(*zip(*parts, strict=True))
    exact, exact_lse = reference.attention(q, k, v, visible, return_lse=True)
    tolerance = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


@few(max_examples=25)
@given(types, st.permutations(range(4)), st.integers(1, 3), st.integers(0, 3), seeds)
def test_the_result_depends_on_values_and_not_on_strides(
    dtype: torch.dtype, order: list[int], step: int, offset: int, seed: int
) -> None:
    shape = (2, 3, 21, 16)
    dense = draw_rows(seed, shape, shape, shape, dtype=dtype)

    def strided(x: Tensor) -> Tensor:
        """The same values in memory ordered otherwise, with gaps."""
        extents = [shape[n] for n in order]
        memory = x.new_full((*extents[:-1], extents[-1] * step + offset), torch.nan)
        view = memory[..., offset::step][..., : extents[-1]].permute([order.index(n) for n in range(4)])
        view.copy_(x)
        return view

    expected = attention(*dense, is_causal=True)
    assert torch.equal(attention(*map(strided, dense), is_causal=True), expected)
