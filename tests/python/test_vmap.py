"""vmap over rows, masks, sinks and dropout: the same as a loop."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import HQ, SK, SQ, B, rows
from tilewise import attention
from torch import Tensor

VMAPPED: dict[str, Any] = {
    "all rows": ((0, 0, 0), {}),
    "queries": ((1, None, None), {}),
    "keys and values": ((None, 2, 2), {"is_causal": True}),
    "softcap": ((0, 0, 0), {"softcap": 2.0, "window": (3, 3)}),
    "slopes": ((0, 0, 0), {"alibi_slopes": torch.rand(HQ)}),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_is_a_loop(name: str) -> None:
    dims, options = VMAPPED[name]
    n = 3
    base = [
        x.detach() if d is None else torch.randn(n, *x.shape).movedim(0, d)
        for x, d in zip(rows(), dims, strict=True)
    ]
    attend = functools.partial(attention, enable_gqa=True, return_lse=True, **options)
    out, lse = torch.vmap(attend, dims)(*base)
    at = [[x if d is None else x.select(d, i) for x, d in zip(base, dims, strict=True)] for i in range(n)]
    for ours, theirs in zip((out, lse), zip(*(attend(*x) for x in at), strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))

    def loss(*tensors: Tensor) -> Tensor:
        return attend(*tensors)[0].pow(2).sum()

    per_item = torch.vmap(torch.func.grad(loss, (0, 1, 2)), dims)(*base)
    expected = [torch.func.grad(loss, (0, 1, 2))(*x) for x in at]
    for ours, theirs in zip(per_item, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask_shape", [(SQ, SK), (1, 1, SQ, SK), (B, 1, 1, SK), (HQ, SQ, 1)], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_vmap_over_masks_and_sinks(mask_shape: tuple[int, ...], mapped: bool) -> None:
    n = 3
    q, k, v = (torch.randn(n, *x.shape) for x in rows())
    mask, sinks = torch.randn(n, *mask_shape), torch.randn(n, HQ)
    if not mapped:
        mask, sinks = mask[0], sinks[0]
    dims = (0, 0, 0, *((0, 0) if mapped else (None, None)))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, mask, enable_gqa=True, sinks=sinks)

    def loss(*tensors: Tensor) -> Tensor:
        return attend(*tensors).pow(2).sum()

    items = [(q[i], k[i], v[i], mask[i] if mapped else mask, sinks[i] if mapped else sinks) for i in range(n)]
    out = torch.vmap(attend, dims)(q, k, v, mask, sinks)
    torch.testing.assert_close(out, torch.stack([attend(*item) for item in items]))
    found = torch.vmap(torch.func.grad(loss, (0, 1, 2, 3, 4)), dims)(q, k, v, mask, sinks)
    expected = zip(*(torch.func.grad(loss, (0, 1, 2, 3, 4))(*item) for item in items), strict=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask_shape", [(SQ, SK), (1, 1, SQ, SK), (B, 1, 1, SK), (HQ, SQ, 1)], ids=str)
@pytest.mark.parametrize("along", [0, -1])
def test_vmap_over_a_mask_alone(mask_shape: tuple[int, ...], along: int) -> None:
    """A part of the batch, whatever the mask's rank and wherever its new dimension is."""
    q, k, v = rows()
    masks = torch.randn(3, *mask_shape)

    def attend(mask: Tensor) -> Tensor:
        return attention(q, k, v, mask, enable_gqa=True)

    out = torch.vmap(attend, along)(masks.movedim(0, along))
    torch.testing.assert_close(out, torch.stack([attend(mask) for mask in masks]))

    def gradient(mask: Tensor) -> Tensor:
        return torch.func.grad(lambda x: attention(x, k, v, mask, enable_gqa=True).pow(2).sum())(q)

    found = torch.vmap(gradient, along)(masks.movedim(0, along))
    expected = torch.stack([gradient(mask) for mask in masks])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_vmap_over_learned_scales() -> None:
    q, k, v = rows()
    factors = torch.rand(3, HQ)

    def loss(logit_scale: Tensor) -> Tensor:
        return attention(q, k, v, enable_gqa=True, logit_scale=logit_scale).pow(2).sum()

    found = torch.vmap(torch.func.grad(loss))(factors)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(x) for x in factors]))


def test_the_gradient_of_a_vmap() -> None:
    q, k, v = (torch.randn(3, *x.shape, requires_grad=True) for x in rows())
    attend = functools.partial(attention, enable_gqa=True)
    found = torch.autograd.grad(torch.vmap(attend)(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(
        torch.stack([attend(*x) for x in zip(q, k, v, strict=True)]).sum(), (q, k, v)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_vmapped_dropout_follows_its_randomness() -> None:
    x = torch.randn(1, 2, 8, 8).expand(3, 1, 2, 8, 8)

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, dropout_p=0.5)

    same = torch.vmap(attend, randomness="same")(x)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    different = torch.vmap(attend, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend)(x)
