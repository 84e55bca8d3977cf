"""What the kernel in Triton must give, on any device that it runs on.

test_triton.py runs these cases: on the CPU by Triton's interpreter, in a process of its own, because Triton
reads TRITON_INTERPRET once and for everybody; and on a GPU as compiled code.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tilewise
import torch
from conftest import assert_close_with_gradients, check_against, gradients, leaf
from conftest import rows as all_rows
from tilewise import attention, reference
from torch import Tensor

# Two tiles of queries and of keys, not full at the end.
SIZES = {"b": 2, "hq": 2, "hkv": 1, "sq": 37, "sk": 53, "d": 40, "dv": 24}
B, HQ, SQ, SK = (SIZES[name] for name in ("b", "hq", "sq", "sk"))

rows = functools.partial(all_rows, **SIZES)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)


def both(**options: Any) -> dict[str, Any]:
    options = {"enable_gqa": True, "return_lse": True} | options
    return {
        "ours": functools.partial(attention, kernel="triton", **options),
        "reference": functools.partial(reference.attention, **options),
    }


OPTIONS: dict[str, Any] = {
    "plain": lambda _: {},
    "scale": lambda _: {"scale": -0.25},
    "causal": lambda _: {"is_causal": True},
    "causal bottom right": lambda _: {"is_causal": True, "alignment": "bottom_right"},
    "window": lambda _: {"window": (7, 3)},
    "window to the left": lambda _: {"window": (2**40, 0)},
    "window bottom right": lambda _: {"window": (20, None), "alignment": "bottom_right", "is_causal": True},
    "softcap": lambda _: {"softcap": 2.0},
    "wide softcap": lambda _: {"softcap": 50.0},
    "alibi": lambda d: {"alibi_slopes": torch.rand(HQ, device=d)},
    "alibi per entry": lambda d: {"alibi_slopes": torch.rand(B, HQ, device=d)},
    "boolean mask": lambda d: {"attn_mask": torch.rand(B, 1, SQ, SK, device=d) < 0.5},
    "boolean mask per head": lambda d: {"attn_mask": torch.rand(HQ, SQ, SK, device=d) < 0.1},
    "padding mask": lambda d: {
        "attn_mask": torch.arange(SK, device=d) < torch.tensor([[[[20]]], [[[0]]]], device=d)
    },
    "dropout": lambda _: {"dropout_p": 0.3},
    "everything dropped": lambda _: {"dropout_p": 1.0},
    "all": lambda d: {
        "is_causal": True,
        "alignment": "bottom_right",
        "window": (30, 5),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(HQ, device=d),
        "attn_mask": torch.rand(B, HQ, SQ, SK, device=d) < 0.7,
        "dropout_p": 0.2,
        "scale": 0.5,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_in_f32_are_within_the_contract(name: str, device: torch.device) -> None:
    check_against(**both(**OPTIONS[name](device)), rows=rows(device=device), extra={})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", ["plain", "causal bottom right", "window", "softcap", "padding mask", "all"])
def test_outputs_and_gradients_in_16_bits_are_within_the_contract(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    check_against(**both(**OPTIONS[name](device)), rows=rows(dtype, device), extra={})


@pytest.mark.parametrize("shape", [(SK,), (SQ, 1), (1, HQ, 1, SK), (B, 1, SQ, SK), (B, HQ, SQ, SK), ()])
def test_an_additive_mask_of_any_shape_has_its_gradient(shape: tuple[int, ...], device: torch.device) -> None:
    mask = leaf(*shape, device=device)
    check_against(**both(softcap=3.0, is_causal=True), rows=rows(device=device), extra={"attn_mask": mask})


@pytest.mark.parametrize("wide", [False, True], ids=["own type", "f32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_an_additive_mask_in_either_type(wide: bool, dtype: torch.dtype, device: torch.device) -> None:
    mask = leaf(B, 1, SQ, SK, dtype=torch.float32 if wide else dtype, device=device)
    check_against(**both(), rows=rows(dtype, device), extra={"attn_mask": mask})


@dtypes
def test_sinks_have_their_gradient(dtype: torch.dtype, device: torch.device) -> None:
    sinks = leaf(HQ, device=device)
    options = both(is_causal=True, window=(4, None))
    check_against(**options, rows=rows(dtype, device), extra={"sinks": sinks})


@pytest.mark.parametrize(
    "sizes",
    [
        *({"sq": 0}, {"sk": 0}, {"b": 0}, {"sq": 1}, {"sk": 1}, {"d": 1, "dv": 1}, {"d": 16, "dv": 64}),
        *({"hkv": 2}, {"hq": 6, "hkv": 2}, {"sq": 64, "sk": 96}),
        *({"hq": 1, "d": 257, "dv": 3}, {"hq": 1, "d": 3, "dv": 130}, {"hq": 1, "d": 192, "dv": 128}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_any_sizes(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
    x = all_rows(dtype, device, **(SIZES | {"b": 1} | sizes))
    check_against(**both(is_causal=True), rows=x, extra={})


def test_any_strides_are_read_where_they_are(device: torch.device) -> None:
    q, k, v = (x.detach() for x in rows(device=device))
    expected = attention(q, k, v, enable_gqa=True, kernel="triton")
    heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    dims_outside = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for given in (heads_inside, dims_outside):
        out = attention(*given, enable_gqa=True, kernel="triton")
        assert torch.equal(out, expected)
    assert attention(*heads_inside, enable_gqa=True, kernel="triton").stride(1) < expected.stride(1)
    one_key = k[:, :, :1].expand(k.shape)
    exact = reference.attention(q, one_key, v, enable_gqa=True)
    torch.testing.assert_close(
        attention(q, one_key, v, enable_gqa=True, kernel="triton").double(), exact, atol=1e-6, rtol=1e-5
    )


def test_rows_that_see_nothing_are_zero_and_have_no_gradient(device: torch.device) -> None:
    q, k, v = rows(device=device)
    mask = torch.zeros(SQ, SK, device=device)
    mask[3:5] = -torch.inf
    mask.requires_grad_()
    out, lse = attention(q, k, v, mask, enable_gqa=True, return_lse=True, kernel="triton")
    assert (out[:, :, 3:5] == 0).all() and (lse[:, :, 3:5] == -torch.inf).all()
    found = gradients([out], [q, k, v, mask], [torch.ones_like(out)])
    assert (found[0][:, :, 3:5] == 0).all() and all(x.isfinite().all() for x in found)
    sinks = torch.full((HQ,), -torch.inf, device=device, requires_grad=True)
    out = attention(q, k, v, mask, enable_gqa=True, sinks=sinks, kernel="triton")
    assert (out[:, :, 3:5] == 0).all()
    assert (gradients([out], [sinks], [torch.ones_like(out)])[0] == 0).all()


def test_gradients_have_the_same_bits_in_every_run(device: torch.device) -> None:
    q, k, v = rows(torch.float16, device)
    mask = leaf(SQ, SK, device=device)
    results = []
    for _ in range(2):
        out = attention(q, k, v, mask, enable_gqa=True, deterministic=True, kernel="triton")
        results.append([out, *gradients([out], [q, k, v, mask], [torch.ones_like(out)])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_the_gradients_that_are_asked_for(device: torch.device) -> None:
    every = rows(device=device)
    out = attention(*every, enable_gqa=True, kernel="triton")
    expected = gradients([out], every, [torch.ones_like(out)])
    for index in range(3):
        given = [x if n == index else x.detach() for n, x in enumerate(every)]
        out = attention(*given, enable_gqa=True, kernel="triton")
        (found,) = gradients([out], [given[index]], [torch.ones_like(out)])
        assert torch.equal(found, expected[index])


def test_backward_takes_what_another_kernel_gave_forward(device: torch.device) -> None:
    q, k, v = (x.detach() for x in rows(device=device))
    ours, others = (
        attention(q, k, v, enable_gqa=True, kernel=name, return_lse=True) for name in ("triton", "auto")
    )
    needed = [True, True, True, False, False]
    grad = torch.randn_like(ours[0])
    arguments = (q, k, v, None, 0.0, False, None, True)
    results = [
        torch.ops.tilewise.triton_backward(grad, None, *given, needed, *arguments) for given in (ours, others)
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# What PyTorch makes of it


def test_compile_without_a_break(device: torch.device) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(
            q * 2, k, v, enable_gqa=True, is_causal=True, softcap=4.0, return_lse=True, kernel="triton"
        )
        return out + lse.unsqueeze(-1)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ({}, {"sq": 40, "sk": 70}):
        q, k, v = all_rows(device=device, **(SIZES | sizes))
        assert_close_with_gradients(compiled, attend, [q, k, v])


def test_the_operators_are_registered_as_torch_wants_them(device: torch.device) -> None:
    q, k, v = rows(device=device)
    arguments = (q, k, v, None, 0.0, True, None, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewise.triton_forward.default, arguments, test_utils=checks)


def test_vmap_is_a_larger_batch(device: torch.device) -> None:
    q, k, v = (torch.stack([x, 2 * x]).detach() for x in rows(device=device))
    attend = functools.partial(attention, enable_gqa=True, is_causal=True, kernel="triton")
    expected = torch.stack([attend(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(q, k, v), expected)
    found = torch.func.grad(lambda *x: attend(*x).sum())(q[0], k[0], v[0])
    leaves = [x[0].requires_grad_() for x in (q, k, v)]
    torch.testing.assert_close(found, torch.autograd.grad(attend(*leaves).sum(), leaves[0])[0])


def test_autocast_casts_rows(device: torch.device) -> None:
    q, k, v = rows(device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = attention(q, k, v, enable_gqa=True, kernel="triton")
    assert out.dtype == torch.bfloat16
    (found,) = gradients([out], [q], [torch.ones_like(out)])
    assert found.dtype == torch.float32


# Words


def test_explain_says_that_it_runs_both_passes(device: torch.device) -> None:
    q, k, v = rows(device=device)
    text = tilewise.explain(q, k, v, enable_gqa=True, kernel="triton")
    assert text.count("  triton: chosen") == 2 and text.count("chosen") == 2
    assert "  triton: able" in tilewise.explain(q, k, v, enable_gqa=True)


def refused(argument: str, reason: str) -> Any:
    return pytest.raises(tilewise.Unsupported, match=f"^{argument}: kernel 'triton' {reason}$")


def test_what_it_does_not_take_is_named(device: torch.device) -> None:
    q, k, v = (x.detach() for x in rows(device=device))
    blocks = tilewise.BlockMask.from_dense(torch.ones(1, 1, SQ, SK, dtype=torch.bool, device=device))
    with refused("block_mask", "does not support block masks"):
        attention(q, k, v, enable_gqa=True, block_mask=blocks, kernel="triton")
    text = tilewise.explain(q, k, v, enable_gqa=True, block_mask=blocks)
    assert "  triton: cannot: does not support block masks" in text
    wide = [x.double() for x in (q, k, v)]
    with refused("query", "needs f32, f16 or bf16, got f64"):
        attention(*wide, enable_gqa=True, kernel="triton")
    assert "  triton: cannot: needs f32" in tilewise.explain(*wide, enable_gqa=True)
    ends = torch.tensor([0, 4], dtype=torch.int32, device=device)
    packed = torch.randn(4, 2, 8, device=device)
    with refused("cu_seqlens_q", "does not support packed sequences"):
        tilewise.attention_varlen(packed, packed, packed, ends, ends, 4, 4, kernel="triton")
    used = torch.tensor([3] * B, dtype=torch.int32, device=device)
    with refused("cache_seqlens", "does not support key lengths"):
        tilewise.attention_decode(q, k, v, used, kernel="triton")
    pages = torch.zeros(B, 1, dtype=torch.int32, device=device)
    with refused("page_table", "does not support paged keys"):
        tilewise.attention_decode(q, k, v, used, pages, kernel="triton")


def test_malformed_arguments_are_named_before_anything_runs(device: torch.device) -> None:
    q, k, v = (x.detach() for x in rows(device=device))
    with pytest.raises(tilewise.InvalidArgument, match=r"^enable_gqa: expected True"):
        attention(q, k, v, kernel="triton")
    with pytest.raises(tilewise.InvalidArgument, match=r"^key: "):
        attention(q, k[..., :-1], v, enable_gqa=True, kernel="triton")
    with pytest.raises(tilewise.InvalidArgument, match=r"^attn_mask: "):
        attention(
            q, k, v, torch.ones(SQ, SK + 1, dtype=torch.bool, device=device), enable_gqa=True, kernel="triton"
        )
