"""`batch_invariant=True`: the bits of a sequence are the same in every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from tilewise import attention, attention_decode, attention_varlen, explain
from tilewise.integrations import flash_attn
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16)
LENGTHS = (7, 130, 300, 1)  # of the sequences; the second is looked at
OWN = 1


def sequence(
    length: int, dtype: torch.dtype, device: torch.device, hq: int = 4, hkv: int = 2
) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of out, [1, H, length, D]."""
    return tuple(torch.randn(1, heads, length, 64, device=device).to(dtype) for heads in (hq, hkv, hkv, hq))


def computed(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, call: Callable[..., Any]) -> tuple[Tensor, ...]:
    rows = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*rows)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, rows, grad)


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 4.0}], ids=["plain", "causal"])
def test_dense_and_packed_calls_agree_to_the_bit(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device
) -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, enable_gqa=True, batch_invariant=True, return_lse=True, **options)

    sequences = [sequence(length, dtype, device) for length in LENGTHS]
    alone = computed(*sequences[OWN], dense)

    others = [sequence(LENGTHS[OWN], dtype, device) for _ in range(40)]
    batch = [torch.cat(x) for x in zip(*others[:9], sequences[OWN], *others[9:], strict=True)]
    assert same(alone, tuple(x[9:10] for x in computed(*batch, dense)))

    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        sizes = (ends, ends, max(LENGTHS), max(LENGTHS))
        return attention_varlen(q, k, v, *sizes, batch_invariant=True, return_lse=True, **options)

    rows = [torch.cat([x[0] for x in of], 1).transpose(0, 1) for of in zip(*sequences, strict=True)]
    begin, end = int(ends[OWN]), int(ends[OWN + 1])
    out, lse, *gradients = computed(*rows, packed)
    own = [x[begin:end].transpose(0, 1)[None] for x in (out, *gradients)]
    assert same(alone, (own[0], lse[None, :, begin:end], *own[1:]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("pages", [False, True], ids=["dense", "paged"])
def test_a_cached_sequence_has_the_same_bits_whatever_the_capacity(
    dtype: torch.dtype, pages: bool, device: torch.device
) -> None:
    used, page = 300, 16
    q = torch.randn(1, 8, 1, 64, device=device).to(dtype)
    _, k, v, _ = sequence(used, dtype, device)

    def decode(batch: int, place: int, capacity: int) -> tuple[Tensor, ...]:
        lengths = torch.randint(1, capacity, (batch,), dtype=torch.int32, device=device)
        lengths[place] = used
        queries = torch.randn(batch, 8, 1, 64, device=device).to(dtype)
        queries[place] = q[0]
        caches = [torch.randn(batch, 2, capacity, 64, device=device).to(dtype) for _ in range(2)]
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[place, :, :used] = rows[0]
        table = None
        if pages:
            caches = [x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1) for x in caches]
            table = torch.arange(batch * capacity // page, dtype=torch.int32, device=device).view(batch, -1)
        results = attention_decode(queries, *caches, lengths, table, batch_invariant=True, return_lse=True)
        return tuple(x[place] for x in results)

    alone = decode(1, 0, 304)
    for batch, place, capacity in ((2, 1, 4096), (40, 17, 512)):
        assert same(alone, decode(batch, place, capacity))


def test_without_it_bits_depend_on_the_batch() -> None:
    q, k, v = (torch.randn(40, 1, x, 16) for x in (3, 2100, 2100))
    for batch_invariant in (False, True):
        whole = attention(q, k, v, batch_invariant=batch_invariant)
        one = attention(q[7:8], k[7:8], v[7:8], batch_invariant=batch_invariant)
        assert torch.equal(whole[7:8], one) is batch_invariant


def test_flash_attn_functions_take_it() -> None:
    q, k = torch.randn(40, 3, 1, 16), torch.randn(40, 2100, 1, 16)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    more: dict[str, Any] = {"batch_invariant": True}
    whole = flash_attn.flash_attn_func(q, k, k, **more)[7]
    assert torch.equal(whole, flash_attn.flash_attn_func(q[7:8], k[7:8], k[7:8], **more)[0])
    keys = torch.tensor([0, 2100], dtype=torch.int32)
    assert torch.equal(
        whole, flash_attn.flash_attn_varlen_func(q[7], k[7], k[7], ends, keys, 3, 2100, **more)
    )
    whole = flash_attn.flash_attn_with_kvcache(q, k, k, **more)[7]
    assert torch.equal(whole, flash_attn.flash_attn_with_kvcache(q[7:8], k[7:8], k[7:8], **more)[0])


def test_explain_names_it_and_the_triton_kernel_refuses_it() -> None:
    q = torch.randn(1, 2, 16, 8)
    assert "batch invariant" in explain(q, q, q, batch_invariant=True).splitlines()[0]
    assert "batch invariant" not in explain(q, q, q)
    with pytest.raises(tilewise.Unsupported, match="triton"):
        attention(q, q, q, kernel="triton", batch_invariant=True)


def test_compiled_calls_keep_it() -> None:
    @torch.compile(backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, batch_invariant=True)

    q, k, v = (torch.randn(40, 1, x, 16) for x in (3, 2100, 2100))
    assert torch.equal(compiled(q, k, v)[7:8], attention(q[7:8], k[7:8], v[7:8], batch_invariant=True))
