"""Malformed calls raise before any work, and say which argument, what it should be and what came."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import tilewise
import torch
from tilewise import (
    InvalidArgument,
    Unsupported,
    _errors,
    _ops,
    attention,
    attention_decode,
    attention_varlen,
    merge_states,
    nn,
    scaled_dot_product_attention,
)
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left


def rows(
    b: int = 2, hq: int = 4, hkv: int = 4, sq: int = 5, sk: int = 7, d: int = 8, dv: int = 8, **how: Any
) -> list[Tensor]:
    shapes = ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
    return [torch.zeros(shape, **how) for shape in shapes]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def swap(index: int, tensor: Any) -> list[Any]:
    """Sound rows but for one."""
    changed: list[Any] = rows()
    changed[index] = tensor
    return changed


class Case(NamedTuple):
    call: Callable[[], Any]
    argument: str
    expected: str  # in the text
    given: str = ""  # in the text
    kind: type[Exception] = InvalidArgument


def dense(
    argument: str, expected: str, given: str = "", *, kind: type = InvalidArgument, **options: Any
) -> Case:
    tensors = options.pop("rows", None) or rows()
    return Case(lambda: attention(*tensors, **options), argument, expected, given, kind)


def varlen(
    argument: str, expected: str, given: str = "", *, kind: type = InvalidArgument, **options: Any
) -> Case:
    ends = ints(0, 4, 9)
    sound: dict[str, Any] = {"query": torch.zeros(9, 4, 8), "key": torch.zeros(9, 2, 8)}
    sound |= {"value": torch.zeros(9, 2, 6), "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    sound |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
    return Case(lambda: attention_varlen(**(sound | options)), argument, expected, given, kind)


def decode(
    argument: str, expected: str, given: str = "", *, kind: type = InvalidArgument, **options: Any
) -> Case:
    sound: dict[str, Any] = {"query": torch.zeros(2, 4, 1, 8), "k_cache": torch.zeros(2, 2, 16, 8)}
    sound |= {"v_cache": torch.zeros(2, 2, 16, 6), "cache_seqlens": ints(3, 16)}
    return Case(lambda: attention_decode(**(sound | options)), argument, expected, given, kind)


def paged(argument: str, expected: str, given: str = "", **options: Any) -> Case:
    pages = {"k_cache": torch.zeros(4, 2, 8, 8), "v_cache": torch.zeros(4, 2, 8, 6)}
    table = {"page_table": ints(0, 1, 2, 3).view(2, 2)}
    return decode(argument, expected, given, **(pages | table | options))


def layer(argument: str, expected: str, given: str = "", **options: Any) -> Case:
    return Case(
        lambda: nn.Attention(**({"embed_dim": 32, "num_heads": 4} | options)), argument, expected, given
    )


def multihead(argument: str, expected: str, given: str = "", **options: Any) -> Case:
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    sound: dict[str, Any] = dict(zip(("query", "key", "value"), torch.zeros(3, 2, 6, 32), strict=True))
    return Case(lambda: module(**(sound | options)), argument, expected, given)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(4, n, 8) for n in (3, 5)], layout=torch.jagged)


BLOCKS = tilewise.BlockMask.from_dense(torch.ones(1, 1, 5, 7, dtype=torch.bool).tril(), block_size=4)

CASES: dict[str, Case] = {
    # Rows
    "rank of query": dense("query", "rank 4 [B, Hq, Sq, D]", "[4, 5, 8]", rows=swap(0, torch.zeros(4, 5, 8))),
    "rank of key": dense("key", "rank 4 [B, Hkv, Sk, D]", "[7, 8]", rows=swap(1, torch.zeros(7, 8))),
    "rank of value": dense("value", "rank 4", "[1, 2, 4, 7, 8]", rows=swap(2, torch.zeros(1, 2, 4, 7, 8))),
    "head dim of key": dense(
        "key", "the head dim of ", "[2, 4, 7, 9]", rows=swap(1, torch.zeros(2, 4, 7, 9))
    ),
    "length of value": dense(
        "value", "the length of ", "[2, 4, 6, 8]", rows=swap(2, torch.zeros(2, 4, 6, 8))
    ),
    "batch of key": dense("key", "the batch of ", "[3, 4, 7, 8]", rows=[rows()[0], *rows(b=3)[1:]]),
    "batch of value": dense(
        "value", "first extent, 2", "[3, 4, 7, 8]", rows=swap(2, torch.zeros(3, 4, 7, 8))
    ),
    "heads of value": dense(
        "value", "as many heads as ", "[2, 2, 7, 8]", rows=swap(2, torch.zeros(2, 2, 7, 8))
    ),
    "heads do not divide": dense(
        "query", "a multiple of ", "[2, 4, 5, 8]", rows=rows(hkv=3), enable_gqa=True
    ),
    "heads shared unasked": dense(
        "enable_gqa", "True where query has 4 heads and key 2", "False", rows=rows(hkv=2)
    ),
    "no head dim": dense("query", "a head dim from 1 to 4096", "[2, 4, 5, 0]", rows=rows(d=0)),
    "head dim too large": dense("query", "a head dim from 1 to 4096", "4097", rows=rows(d=4097)),
    "value's head dim too large": dense("value", "a head dim from 1 to 4096", "4097", rows=rows(dv=4097)),
    "integers": dense("query", "f32, f16, bf16 or f64", "", rows=rows(dtype=torch.int32)),
    "complex numbers": dense("query", "f32, f16, bf16 or f64", "", rows=rows(dtype=torch.complex64)),
    "booleans": dense("query", "f32, f16, bf16 or f64", "", rows=rows(dtype=torch.bool)),
    "type of key": dense("key", "the type of ", "f16", rows=swap(1, torch.zeros(2, 4, 7, 8).half())),
    "type of value": dense("value", "the type of ", "bf16", rows=swap(2, torch.zeros(2, 4, 7, 8).bfloat16())),
    "device of key": dense("key", "cpu", "meta", rows=swap(1, torch.zeros(2, 4, 7, 8, device="meta"))),
    "device of query": dense("key", "meta", "cpu", rows=swap(0, torch.zeros(2, 4, 5, 8, device="meta"))),
    "sparse query": dense(
        "query", "a dense tensor", "sparse_coo", rows=swap(0, torch.zeros(2, 4, 5, 8).to_sparse())
    ),
    "sparse value": dense(
        "value", "a dense tensor", "sparse_coo", rows=swap(2, torch.zeros(2, 4, 7, 8).to_sparse())
    ),
    "nested": dense("query", "a dense tensor", "nested", rows=[nested()] * 3),
    "query is a list": dense("query", "Tensor", "list", rows=swap(0, [1.0]), kind=TypeError),
    "key is None": dense("key", "Tensor", "None", rows=swap(1, None), kind=TypeError),
    # Masks
    "mask does not broadcast": dense("attn_mask", "7", "[5, 6]", attn_mask=torch.zeros(5, 6)),
    "mask for another batch": dense("attn_mask", "2", "[3, 1, 5, 7]", attn_mask=torch.zeros(3, 1, 5, 7)),
    "mask of rank 5": dense("attn_mask", "at most rank 4", "", attn_mask=torch.zeros(1, 2, 4, 5, 7)),
    "integer mask": dense("attn_mask", "boolean or floating", "", attn_mask=torch.zeros(5, 7).int()),
    "byte mask": dense("attn_mask", "boolean or floating", "", attn_mask=torch.zeros(5, 7).byte()),
    "wider mask": dense(
        "attn_mask", "boolean, f32 or the type of ", "f64", attn_mask=torch.zeros(5, 7).double()
    ),
    "mask elsewhere": dense("attn_mask", "cpu", "meta", attn_mask=torch.zeros(5, 7, device="meta")),
    "mask is a list": dense("attn_mask", "Tensor", "list", attn_mask=[[True]], kind=TypeError),
    "sparse mask": dense("attn_mask", "a dense tensor", "sparse", attn_mask=torch.zeros(5, 7).to_sparse()),
    "block mask of another kind": dense(
        "block_mask", "tilewise.BlockMask or torch's", "str", block_mask="causal"
    ),
    "block mask for another length": dense(
        "block_mask.length_q", "the length of query, 50", "5", rows=rows(sq=50), block_mask=BLOCKS
    ),
    "too few blocks in a mask of unknown length": dense(
        "block_mask.counts",
        "13 query blocks",
        "[1, 1, 2]",
        rows=rows(sq=50),
        block_mask=replace(BLOCKS, length_q=None, length_k=None),
    ),
    # Options
    "scale is NaN": dense("scale", "a finite number", "nan", scale=float("nan")),
    "scale is infinite": dense("scale", "a finite number", "inf", scale=float("inf")),
    "scale is text": dense("scale", "float", "str", scale="1", kind=TypeError),
    "dropout above 1": dense("dropout_p", "[0, 1]", "1.5", dropout_p=1.5),
    "dropout below 0": dense("dropout_p", "[0, 1]", "-0.1", dropout_p=-0.1),
    "dropout is NaN": dense("dropout_p", "[0, 1]", "nan", dropout_p=float("nan")),
    "softcap below 0": dense("softcap", "0 or above", "-1", softcap=-1.0),
    "softcap is NaN": dense("softcap", "a finite number", "nan", softcap=float("nan")),
    "softcap is infinite": dense("softcap", "a finite number", "inf", softcap=float("inf")),
    "alignment": dense("alignment", "'top_left' or 'bottom_right'", "'left'", alignment="left"),
    "window of one": dense("window", "(left, right)", "(3,)", window=(3,)),
    "window is a number": dense("window", "(left, right)", "3", window=3),
    "window left below 0": dense("window[0]", "0 or above", "-1", window=(-1, 0)),
    "window right below 0": dense("window[1]", "0 or above", "-2", window=(0, -2)),
    "window of fractions": dense("window[0]", "int", "float", window=(1.5, 0), kind=TypeError),
    "unknown kernel": dense("kernel", "", "'fast'", kernel="fast"),
    "kernel is a number": dense("kernel", "str", "int", kernel=3, kind=TypeError),
    "slopes for other heads": dense("alibi_slopes", "[Hq]", "[3]", alibi_slopes=torch.ones(3)),
    "slopes in half": dense("alibi_slopes", "f32", "f16", alibi_slopes=torch.ones(4).half()),
    "slopes of rank 3": dense("alibi_slopes", "[Hq]", "[1, 2, 4]", alibi_slopes=torch.ones(1, 2, 4)),
    "sinks for other heads": dense("sinks", "[Hq]", "[5]", sinks=torch.ones(5)),
    "sinks of rank 2": dense("sinks", "[Hq]", "[2, 4]", sinks=torch.ones(2, 4)),
    "integer sinks": dense("sinks", "f32", "", sinks=torch.ones(4, dtype=torch.int64)),
    "sinks elsewhere": dense("sinks", "cpu", "meta", sinks=torch.ones(4, device="meta")),
    "logit scale for other heads": dense("logit_scale", "[Hq]", "[5]", logit_scale=torch.ones(5)),
    "logit scale in half": dense("logit_scale", "f32", "f16", logit_scale=torch.ones(4).half()),
    # torch's function
    "sdpa: rank 1": Case(
        lambda: scaled_dot_product_attention(*[torch.zeros(8)] * 3), "query", "at least rank 2", "rank 1"
    ),
    "sdpa: leading dimensions": Case(
        lambda: scaled_dot_product_attention(
            torch.zeros(2, 5, 8), torch.zeros(3, 5, 8), torch.zeros(3, 5, 8)
        ),
        "key",
        "broadcast",
        "[3]",
    ),
    "sdpa: a list": Case(
        lambda: scaled_dot_product_attention(*swap(1, [1])), "key", "Tensor", "list", TypeError
    ),
    "sdpa: a mask and causal": Case(
        lambda: scaled_dot_product_attention(*rows(), torch.ones(5, 7, dtype=torch.bool), is_causal=True),
        "attn_mask",
        "None with is_causal",
        "[5, 7]",
    ),
    "sdpa: CausalBias and causal": Case(
        lambda: scaled_dot_product_attention(*rows(), causal_upper_left(5, 7), is_causal=True),
        "attn_mask",
        "None with is_causal",
        "5, 7]",
    ),
    "sdpa: dropout": Case(
        lambda: scaled_dot_product_attention(*rows(), dropout_p=2.0), "dropout_p", "[0, 1]", "2"
    ),
    "sdpa: mask": Case(
        lambda: scaled_dot_product_attention(*rows(), torch.zeros(4, 7)), "attn_mask", "5", "[4, 7]"
    ),
    # Packed sequences
    "varlen: rank": varlen("query", "rank 3 [total_q, Hq, D]", "[1, 9, 4, 8]", query=torch.zeros(1, 9, 4, 8)),
    "varlen: heads": varlen("query", "a multiple of ", "[9, 3, 8]", query=torch.zeros(9, 3, 8)),
    "varlen: heads shared unasked": varlen(
        "enable_gqa", "True for 4 heads of query and 2 of keys", "False", enable_gqa=False
    ),
    "varlen: lengths missing": varlen("cu_seqlens_k", "int32 [sequences + 1]", "None", cu_seqlens_k=None),
    "varlen: lengths in int64": varlen(
        "cu_seqlens_q", "int32", "", cu_seqlens_q=ints(0, 4, 9, dtype=torch.int64)
    ),
    "varlen: rank of lengths": varlen(
        "cu_seqlens_q", "rank 1 [sequences + 1]", "[1, 3]", cu_seqlens_q=ints(0, 4, 9)[None]
    ),
    "varlen: numbers of sequences": varlen(
        "cu_seqlens_k", "as many entries as ", "[2]", cu_seqlens_k=ints(0, 9)
    ),
    "varlen: decreasing lengths": varlen("cu_seqlens_q", "", "", cu_seqlens_q=ints(0, 6, 4)),
    "varlen: lengths past the end": varlen(
        "cu_seqlens_k", "9", "12", cu_seqlens_k=ints(0, 4, 12), max_seqlen_k=8
    ),
    "varlen: lengths not from 0": varlen("cu_seqlens_q", "0", "1", cu_seqlens_q=ints(1, 4, 9)),
    "varlen: longest too short": varlen("cu_seqlens_k", "at most the maximum length 4", "5", max_seqlen_k=4),
    "varlen: longest below 0": varlen("max_seqlen_q", "0 or above", "-1", max_seqlen_q=-1),
    "varlen: slopes": varlen("alibi_slopes", "[Hq]", "[3, 4]", alibi_slopes=torch.ones(3, 4)),
    "varlen: lengths elsewhere": varlen("cu_seqlens_q", "cpu", "meta", cu_seqlens_q=ints(0, 4, 9).to("meta")),
    # Caches
    "decode: lengths missing": decode("cache_seqlens", "int32 [B]", "None", cache_seqlens=None),
    "decode: shape of lengths": decode("cache_seqlens", "[2]", "[3]", cache_seqlens=ints(1, 2, 3)),
    "decode: type of lengths": decode(
        "cache_seqlens", "int32", "", cache_seqlens=ints(1, 2, dtype=torch.int64)
    ),
    "decode: lengths over the capacity": decode("cache_seqlens", "16", "17", cache_seqlens=ints(3, 17)),
    "decode: lengths below 0": decode("cache_seqlens", "0", "-1", cache_seqlens=ints(-1, 3)),
    "decode: rank of the cache": decode("k_cache", "rank 4", "[2, 16, 8]", k_cache=torch.zeros(2, 16, 8)),
    "decode: heads of the cache": decode(
        "v_cache", "as many heads as ", "[2, 1, 16, 6]", v_cache=torch.zeros(2, 1, 16, 6)
    ),
    "decode: batch of the cache": decode(
        "k_cache",
        "the batch of ",
        "[3, 2, 16, 8]",
        k_cache=torch.zeros(3, 2, 16, 8),
        v_cache=torch.zeros(3, 2, 16, 6),
    ),
    "decode: type of the cache": decode(
        "k_cache", "the type of ", "f16", k_cache=torch.zeros(2, 2, 16, 8).half()
    ),
    "paged: page past the end": paged(
        "page_table", "from 0 to 3", "4", page_table=ints(0, 1, 2, 4).view(2, 2)
    ),
    "paged: page below 0": paged("page_table", "0", "-1", page_table=ints(0, 1, 2, -1).view(2, 2)),
    "paged: shape of the table": paged(
        "page_table", "[B, max_pages] with B 2", "[4]", page_table=ints(0, 1, 2, 3)
    ),
    "paged: type of the table": paged(
        "page_table", "int32", "", page_table=ints(0, 1, 2, 3, dtype=torch.int64).view(2, 2)
    ),
    "paged: lengths over the capacity": paged("cache_seqlens", "16", "17", cache_seqlens=ints(3, 17)),
    "paged: sizes of pages": paged(
        "v_cache", "the length of ", "[4, 2, 4, 6]", v_cache=torch.zeros(4, 2, 4, 6)
    ),
    # Partial results
    "merge: nothing": Case(lambda: merge_states([], []), "lses", "at least one", "0 for 0"),
    "merge: no sequence": Case(
        lambda: merge_states(None, None), "outs", "a sequence of Tensor", "None", TypeError
    ),
    "merge: no tensors": Case(
        lambda: merge_states([torch.zeros(2, 3)], [1.0]), "lses", "a sequence of Tensor", "[1.0]", TypeError
    ),
    "merge: numbers": Case(
        lambda: merge_states([torch.zeros(2, 3)] * 2, [torch.zeros(2)]),
        "lses",
        "as many tensors as outs",
        "1 for 2",
    ),
    "merge: shapes": Case(
        lambda: merge_states([torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(2)] * 2),
        "outs",
        "parts of one shape",
        "[2, 4]",
    ),
    "merge: shape of lse": Case(
        lambda: merge_states([torch.zeros(2, 3)], [torch.zeros(3)]), "outs", "lses [2]", "lse [3]"
    ),
    # Layers
    "nn: heads": layer("num_heads", "at least 1", "0", num_heads=0),
    "nn: width": layer("embed_dim", "a multiple of num_heads 5", "32", num_heads=5),
    "nn: shared heads": layer("num_kv_heads", "a divisor of num_heads 4", "3", num_kv_heads=3),
    "nn: head dim": layer("head_dim", "1 to 4096", "0", head_dim=0),
    "nn: dropout": layer("dropout", "a number from 0 to 1", "1.5", dropout=1.5),
    "nn: width of x": Case(
        lambda: nn.Attention(32, 4)(torch.zeros(2, 6, 31)), "x", "[B, S, 32]", "[2, 6, 31]"
    ),
    "nn: rank of x": Case(lambda: nn.Attention(32, 4)(torch.zeros(6, 32)), "x", "[B, S, 32]", "[6, 32]"),
    "nn: width of context": Case(
        lambda: nn.Attention(32, 4, context_dim=8)(torch.zeros(2, 6, 32)),
        "context",
        "[B, S, 8]",
        "[2, 6, 32]",
    ),
    "mha: width of key": multihead("key", "[N, S, 32]", "[2, 6, 8]", key=torch.zeros(2, 6, 8)),
    "mha: rank of value": multihead("value", "[N, S, 32]", "[6, 32]", value=torch.zeros(6, 32)),
    "mha: length of value": multihead("value", "[2, 6, 32]", "[2, 5, 32]", value=torch.zeros(2, 5, 32)),
    "mha: batch": multihead("key", "a batch of 3", "2", query=torch.zeros(3, 6, 32)),
    "mha: padding's shape": multihead(
        "key_padding_mask", "[2, 6]", "[6, 2]", key_padding_mask=torch.zeros(6, 2)
    ),
    "mha: padding's type": multihead(
        "key_padding_mask", "boolean or floating", "int64", key_padding_mask=torch.zeros(2, 6).long()
    ),
    "mha: mask's shape": multihead("attn_mask", "[6, 6] or [8, 6, 6]", "[6, 5]", attn_mask=torch.zeros(6, 5)),
    "mha: a hint without a mask": multihead("attn_mask", "the causal mask", "None", is_causal=True),
    "mha: nested": multihead("query", "a dense tensor", "nested", query=nested()),
}


def test_there_are_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_call_raises_and_says_why(name: str) -> None:
    case = CASES[name]
    with pytest.raises((InvalidArgument, Unsupported, TypeError)) as raised:
        case.call()
    assert type(raised.value) is case.kind, f"{type(raised.value).__name__}: {raised.value}"
    text = str(raised.value)
    argument, _, rest = text.partition(": ")
    expected, got, given = rest.rpartition(", got ")
    assert argument == case.argument and got, text
    assert case.expected in expected and case.given in given, text
    assert not re.search(r"\b(q|k|v|cumulative_[qk]|key_lengths|i32|Long)\b", text), (
        "a name of the library's own"
    )


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("scale", "mask ", "sinks ", "heads "))]
)
def test_a_malformed_call_raises_the_same_with_a_gradient(name: str) -> None:
    case = CASES[name]
    with pytest.raises(case.kind) as plain:
        case.call()
    tensors = next(x.cell_contents for x in case.call.__closure__ if isinstance(x.cell_contents, list))
    try:
        for tensor in tensors:
            tensor.requires_grad_()
        with pytest.raises(case.kind) as recorded:
            case.call()
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)
    assert str(recorded.value) == str(plain.value)


def test_a_kernel_that_cannot_take_the_problem_says_why() -> None:
    with pytest.raises(Unsupported, match="kernel 'simd' cannot take this problem") as raised:
        attention(*rows(dtype=torch.float64), kernel="simd")
    assert "simd: needs f32, f16 or bf16, got f64" in str(raised.value)


def test_the_words_of_a_kernels_reason_stay_as_they_are() -> None:
    text = "kernel 'simd' cannot take this problem (forward f64):\n  simd: needs a k, got i32"
    error = _errors.translated(RuntimeError(f"tilewise.Unsupported: {text}"), {}, _errors.DENSE_NAMES)
    assert isinstance(error, Unsupported) and str(error) == text


def test_every_exception_is_of_the_library_and_of_pythons_own_kind() -> None:
    assert issubclass(InvalidArgument, (tilewise.Error, ValueError))
    assert issubclass(Unsupported, (tilewise.Error, NotImplementedError))
    assert issubclass(tilewise.Error, RuntimeError)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_with_a_gradient_is_refused(name: str) -> None:
    learned = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(Unsupported, match=f"{name}: no gradient is computed for it"):
        attention(*rows(), **{name: learned})
    with torch.no_grad():
        assert torch.equal(attention(*rows(), **{name: learned}), attention(*rows(), **{name: 0.5}))


@pytest.mark.parametrize("causal", [1, 1.0, True])
def test_a_flag_is_the_same_whatever_came_before(causal: Any) -> None:
    q = torch.randn(1, 2, 4, 4)
    _ops.plain_calls.clear()
    first = attention(q, q, q, is_causal=causal)
    assert torch.equal(first, attention(q, q, q, is_causal=True))
    assert torch.equal(first, attention(q, q, q, is_causal=causal))
