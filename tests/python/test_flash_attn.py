"""tilewise.integrations.flash_attn: flash-attn 2's functions against the float64 reference."""

from __future__ import annotations

import doctest
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_within_contract, check_against, leaf
from tilewise import reference
from tilewise.integrations import flash_attn
from torch import Tensor

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
B, HQ, HKV, SQ, SK, D = 2, 6, 2, 13, 21, 16
LENGTHS_Q, LENGTHS_K = [5, 1, 7], [9, 1, 11]

OPTIONS: dict[str, Any] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (4, 2)},
    "causal window": {"window_size": (4, -1), "causal": True},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.6, HQ)},
    "dropout": {"dropout_p": 0.3},
    "deterministic": {"causal": True, "deterministic": True},
}
options = pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)


def meaning(given: dict[str, Any]) -> dict[str, Any]:
    """flash-attn's arguments as the reference's."""
    given = dict(given)
    left, right = given.pop("window_size", (-1, -1))
    given["window"] = (None if left < 0 else left, None if right < 0 else right)
    given["is_causal"] = given.pop("causal", False)
    given["scale"] = given.pop("softmax_scale", None)
    given.pop("deterministic", None)
    return given | {"alignment": "bottom_right", "return_lse": True}


def on(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def ours(function: Callable[..., Any], **given: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def attend(*rows: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, nothing = function(*rows, return_attn_probs=True, **given, **more)
        assert nothing is None
        return out, lse

    return attend


def dense(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The reference of [B, S, H, D]."""
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = reference.attention(*rows, enable_gqa=True, **given)
    return out.transpose(1, 2), lse


def ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@dtypes
@options
def test_func(device: torch.device, dtype: torch.dtype, given: dict[str, Any]) -> None:
    given = on(device, given)
    rows = [leaf(B, s, h, D, dtype=dtype, device=device) for s, h in ((SQ, HQ), (SK, HKV), (SK, HKV))]
    expected = functools.partial(dense, **meaning(given))
    check_against(ours(flash_attn.flash_attn_func, **given), expected, rows, {})


@dtypes
@options
def test_qkvpacked_and_kvpacked(device: torch.device, dtype: torch.dtype, given: dict[str, Any]) -> None:
    given = on(device, given)
    packed = leaf(B, SQ, 3, HQ, D, dtype=dtype, device=device)
    check_against(
        ours(flash_attn.flash_attn_qkvpacked_func, **given),
        lambda qkv, **how: dense(*qkv.unbind(2), **meaning(given), **how),
        [packed],
        {},
    )
    q, kv = leaf(B, SQ, HQ, D, dtype=dtype, device=device), leaf(B, SK, 2, HKV, D, dtype=dtype, device=device)
    check_against(
        ours(flash_attn.flash_attn_kvpacked_func, **given),
        lambda q, kv, **how: dense(q, *kv.unbind(2), **meaning(given), **how),
        [q, kv],
        {},
    )


@dtypes
@pytest.mark.parametrize("given", [x for n, x in OPTIONS.items() if n != "dropout"])
def test_varlen(device: torch.device, dtype: torch.dtype, given: dict[str, Any]) -> None:
    given = on(device, given)
    ends_q, ends_k = ends(LENGTHS_Q, device), ends(LENGTHS_K, device)
    lengths = (ends_q, ends_k, max(LENGTHS_Q), max(LENGTHS_K))
    own = (ends_q, ends_q, max(LENGTHS_Q), max(LENGTHS_Q))
    q = leaf(sum(LENGTHS_Q), HQ, D, dtype=dtype, device=device)
    k, v = (leaf(sum(LENGTHS_K), HKV, D, dtype=dtype, device=device) for _ in range(2))
    qkv = leaf(sum(LENGTHS_Q), 3, HQ, D, dtype=dtype, device=device)
    kv = leaf(sum(LENGTHS_K), 2, HKV, D, dtype=dtype, device=device)
    expected = functools.partial(reference.attention_varlen, **meaning(given))

    varlen = ours(flash_attn.flash_attn_varlen_func, **given)
    check_against(
        lambda *rows: varlen(*rows, *lengths),
        lambda *rows, **how: expected(*rows, *lengths, **how),
        [q, k, v],
        {},
    )
    varlen_qkv = ours(flash_attn.flash_attn_varlen_qkvpacked_func, **given)
    check_against(
        lambda qkv: varlen_qkv(qkv, ends_q, max(LENGTHS_Q)),
        lambda qkv, **how: expected(*qkv.unbind(1), *own, **how),
        [qkv],
        {},
    )
    varlen_kv = ours(flash_attn.flash_attn_varlen_kvpacked_func, **given)
    check_against(
        lambda q, kv: varlen_kv(q, kv, *lengths),
        lambda q, kv, **how: expected(q, *kv.unbind(1), *lengths, **how),
        [q, kv],
        {},
    )


@dtypes
def test_sinks_by_the_name_of_flash_attention_3(device: torch.device, dtype: torch.dtype) -> None:
    sinks = {"s_aux": leaf(HQ, dtype=dtype, device=device)}
    rows = [leaf(B, s, h, D, dtype=dtype, device=device) for s, h in ((SQ, HQ), (SK, HKV), (SK, HKV))]
    expected = functools.partial(dense, **meaning({"causal": True}))
    check_against(
        ours(flash_attn.flash_attn_func, causal=True),
        lambda *rows, s_aux, **how: expected(*rows, sinks=s_aux, **how),
        rows,
        sinks,
    )

    lengths = (ends(LENGTHS_Q, device), ends(LENGTHS_K, device), max(LENGTHS_Q), max(LENGTHS_K))
    packed = [
        leaf(sum(n), h, D, dtype=dtype, device=device)
        for n, h in ((LENGTHS_Q, HQ), (LENGTHS_K, HKV), (LENGTHS_K, HKV))
    ]
    varlen = ours(flash_attn.flash_attn_varlen_func)
    check_against(
        lambda *rows, s_aux: varlen(*rows, *lengths, s_aux=s_aux),
        lambda *rows, s_aux, **how: reference.attention_varlen(
            *rows, *lengths, sinks=s_aux, **meaning({}), **how
        ),
        packed,
        sinks,
    )

    q, k, v = (x.detach() for x in rows)
    used = torch.tensor([9, SK], dtype=torch.int32, device=device)
    given = {name: x.detach() for name, x in sinks.items()}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q[:, :1], k, v, cache_seqlens=used, return_softmax_lse=True, **given
    )
    rows_of_heads = (x.transpose(1, 2) for x in (q[:, :1], k, v))
    decode = functools.partial(
        reference.attention_decode, *rows_of_heads, used, sinks=given["s_aux"], return_lse=True
    )
    (exact, exact_lse), (math, math_lse) = (decode(dtype=t) for t in (torch.float64, torch.float32))
    assert_within_contract("out", out, exact.transpose(1, 2), math.transpose(1, 2))
    assert_within_contract("lse", lse, exact_lse, math_lse)


def paged(x: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """[B, S, H, D] as pages in a random order and the table that finds them."""
    pages = x.unflatten(1, (-1, page)).flatten(0, 1)
    place = torch.randperm(len(pages), device=x.device)
    return pages[place.argsort()].clone(), place.view(x.shape[0], -1).int()


def test_varlen_over_pages_is_that_over_their_keys(device: torch.device) -> None:
    cache = torch.randn(2, 24, HKV, D, device=device)
    pages, table = paged(cache, 8)
    ends_k, ends_q = ends([17, 8], device), ends([4, 3], device)
    q = torch.randn(7, HQ, D, device=device)
    packed = torch.cat([cache[0, :17], cache[1, :8]])
    lengths = (ends_q, ends_k, 4, 17)
    expected = flash_attn.flash_attn_varlen_func(q, packed, packed, *lengths, causal=True)
    actual = flash_attn.flash_attn_varlen_func(q, pages, pages, *lengths, causal=True, block_table=table)
    assert torch.equal(actual, expected)


def rotated(
    x: Tensor, first: int, cos: Tensor, sin: Tensor, interleaved: bool, advances: bool = True
) -> Tensor:
    """One sequence [S, H, D], element by element."""
    result, pairs = x.clone(), cos.shape[1]
    for s in range(x.shape[0]):
        for n in range(pairs):
            i, j = (2 * n, 2 * n + 1) if interleaved else (n, n + pairs)
            c, d = cos[first + s * advances, n], sin[first + s * advances, n]
            result[s, :, i] = x[s, :, i] * c - x[s, :, j] * d
            result[s, :, j] = x[s, :, i] * d + x[s, :, j] * c
    return result


CACHES = {
    "contiguous": {},
    "paged": {"page": 8},
    "by batch index": {"entries": [3, 1]},
}


@dtypes
@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("rotary", [None, True, False], ids=["", "rotary interleaved", "rotary halves"])
@pytest.mark.parametrize(
    "given", [OPTIONS[n] for n in ("plain", "causal", "causal window", "softcap", "alibi")]
)
def test_kvcache_appends_and_attends(
    device: torch.device, dtype: torch.dtype, kind: dict[str, Any], rotary: bool | None, given: dict[str, Any]
) -> None:
    given = on(device, given)
    s_cache, s_new, used = 32, 3, torch.tensor([5, 29], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(B, s_new, h, D, device=device).to(dtype) for h in (HQ, HKV, HKV))
    caches = [
        torch.randn(4 if "entries" in kind else B, s_cache, HKV, D, device=device).to(dtype) for _ in "kv"
    ]
    rows = kind.get("entries", list(range(B)))
    angles = torch.rand(s_cache, D // 4, device=device) * 6
    extra: dict[str, Any] = {}
    if rotary is not None:
        extra = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary}

    full, turned = [cache.double() for cache in caches], q.double()
    for b, (row, first) in enumerate(zip(rows, used.tolist(), strict=True)):
        new_k = k[b].float()
        if rotary is not None:
            turn = (angles.cos(), angles.sin(), rotary)
            advances = given.get("causal", False)
            turned[b] = rotated(q[b].float(), first, *turn, advances=advances).to(dtype)
            new_k = rotated(new_k, first, *turn)
        full[0][row, first : first + s_new] = new_k.to(dtype)
        full[1][row, first : first + s_new] = v[b]
    both = (full[0][rows].transpose(1, 2), full[1][rows].transpose(1, 2), used + s_new)

    if "entries" in kind:
        extra["cache_batch_idx"] = torch.tensor(rows, device=device).int()
    stored = caches
    if "page" in kind:
        torch.manual_seed(0)
        k_pages, extra["block_table"] = paged(caches[0], kind["page"])
        torch.manual_seed(0)
        stored = [k_pages, paged(caches[1], kind["page"])[0]]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *stored, k, v, cache_seqlens=used, return_softmax_lse=True, **extra, **given
    )

    expected = functools.partial(reference.attention_decode, turned.transpose(1, 2), *both, **meaning(given))
    (exact, exact_lse), (math, math_lse) = (expected(dtype=t) for t in (torch.float64, torch.float32))
    assert_within_contract("out", out, exact.transpose(1, 2), math.transpose(1, 2))
    assert_within_contract("lse", lse, exact_lse, math_lse)
    if "page" in kind:
        stored = [x[extra["block_table"].long()].flatten(1, 2) for x in stored]
    for cache, wanted in zip(stored, full, strict=True):
        torch.testing.assert_close(
            cache.double(), wanted, atol=1e-6 if dtype == torch.float32 else 0.02, rtol=0
        )


def test_kvcache_takes_one_length_for_all_or_the_whole_cache(device: torch.device) -> None:
    q, cache = torch.randn(B, 1, HQ, D, device=device), torch.randn(B, SK, HKV, D, device=device)
    for used in (7, None):
        keys = cache[:, :used]
        out = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, num_splits=4)
        torch.testing.assert_close(out, flash_attn.flash_attn_func(q, keys, keys))


def test_rows_without_keys_are_zero(device: torch.device) -> None:
    q, k = torch.randn(1, 4, HQ, D, device=device), torch.randn(1, 2, HKV, D, device=device)
    out, lse, _ = flash_attn.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all()


def test_output_is_contiguous_as_given(device: torch.device) -> None:
    q = torch.randn(2, 5, HQ, D, device=device)
    assert flash_attn.flash_attn_func(q, q, q).is_contiguous()


def test_functions_compile_without_a_graph_break() -> None:
    q = leaf(1, 8, 2, 16)
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(q, q, q, causal=True), flash_attn.flash_attn_func(q, q, q, causal=True)
    )


X, KV = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 2, 8)
MALFORMED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "window of one number": (
        ValueError,
        "window_size: expected",
        lambda: flash_attn.flash_attn_func(X, X, X, window_size=3),  # type: ignore[arg-type]
    ),
    "kv as qkv": (ValueError, "qkv: expected", lambda: flash_attn.flash_attn_qkvpacked_func(KV)),
    "left padding": (
        NotImplementedError,
        "cache_leftpad",
        lambda: flash_attn.flash_attn_with_kvcache(X, X, X, cache_leftpad=torch.zeros(2).int()),
    ),
    "k without v": (
        ValueError,
        "v: expected",
        lambda: flash_attn.flash_attn_with_kvcache(X, X, X, k=X, cache_seqlens=0),
    ),
    "k without lengths": (
        ValueError,
        "cache_seqlens: expected",
        lambda: flash_attn.flash_attn_with_kvcache(X, X, X, k=X, v=X),
    ),
    "rotary without k": (
        ValueError,
        "rotary_cos: expected",
        lambda: flash_attn.flash_attn_with_kvcache(
            X, X, X, rotary_cos=X[0, 0], rotary_sin=X[0, 0], cache_seqlens=1
        ),
    ),
    "pages and batch index": (
        ValueError,
        "cache_batch_idx: expected",
        lambda: flash_attn.flash_attn_with_kvcache(
            X, X, X, cache_batch_idx=torch.zeros(2).int(), block_table=torch.zeros(2, 1).int()
        ),
    ),
    "pages of other sequences": (
        ValueError,
        r"block_table: expected int32 \[B, max_blocks\] for cu_seqlens_k \[B \+ 1\], got \[3, 1\]",
        lambda: flash_attn.flash_attn_varlen_func(
            X[0], X, X, *[torch.tensor([0, 2, 4]).int()] * 2, 2, 2, block_table=torch.zeros(3, 1).int()
        ),
    ),
    "a length below 0": (
        ValueError,
        "cache_seqlens: expected 0 or above, got -1",
        lambda: flash_attn.flash_attn_with_kvcache(
            X[:, :1], X.clone(), X.clone(), X[:, :1], X[:, :1], cache_seqlens=torch.tensor([0, -1]).int()
        ),
    ),
    "a page that is not there": (
        ValueError,
        "block_table: expected numbers from 0 to 1, got 2",
        lambda: flash_attn.flash_attn_with_kvcache(
            X[:, :1],
            X.clone(),
            X.clone(),
            X[:, :1],
            X[:, :1],
            cache_seqlens=torch.zeros(2).int(),
            block_table=torch.tensor([[1], [2]]).int(),
        ),
    ),
    "append past the cache": (
        ValueError,
        "cache_seqlens: expected",
        lambda: flash_attn.flash_attn_with_kvcache(X, X.clone(), X.clone(), X, X, cache_seqlens=1),
    ),
}


@pytest.mark.parametrize(("kind", "text", "call"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_raise(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_signatures_start_as_flash_attn_users_write_them() -> None:
    shared = [
        *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"),
        "return_attn_probs",
    ]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    expected = {
        "flash_attn_func": ["q", "k", "v", *shared],
        "flash_attn_qkvpacked_func": ["qkv", *shared],
        "flash_attn_kvpacked_func": ["q", "kv", *shared],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths, *shared, "block_table"],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *shared],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths, *shared],
        "flash_attn_with_kvcache": [
            *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
            *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size"),
            *("softcap", "rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse"),
        ],
    }
    assert set(expected) == set(flash_attn.__all__)
    for name, arguments in expected.items():
        given = inspect.signature(getattr(flash_attn, name)).parameters.values()
        assert [x.name for x in given if x.kind is not x.KEYWORD_ONLY] == arguments, name


def test_examples() -> None:
    found = doctest.testmod(flash_attn)
    assert found.failed == 0 and found.attempted > 0
