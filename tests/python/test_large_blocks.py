"""Blocks larger than the sequences: nothing is evaluated or stored that does not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from conftest import gradients, leaf
from tilewise import BlockMask
from torch import Tensor
from torch.nn.attention import flex_attention

LENGTH_Q, LENGTH_K = 37, 53


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def one_block(device: Any, **options: Any) -> Any:
    counts = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    return flex_attention.BlockMask.from_kv_blocks(counts, indices, **options)


def visible(device: Any) -> Tensor:
    return torch.ones(LENGTH_Q, LENGTH_K, dtype=torch.bool, device=device).tril()


# Of each mask, whether it is the causal one; else it hides nothing.
MASKS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "torch's own for no mask": (
        lambda device: flex_attention._create_empty_block_mask(*torch.zeros(2, 1, device=device)),
        False,
    ),
    "torch's, with a mask_mod": (
        lambda device: one_block(device, BLOCK_SIZE=1 << 30, mask_mod=causal, seq_lengths=(1, 1)),
        True,
    ),
    "torch's, without lengths": (lambda device: one_block(device, BLOCK_SIZE=1 << 29, mask_mod=causal), True),
    "torch's, larger than the lengths": (
        lambda device: flex_attention.create_block_mask(
            causal, None, None, LENGTH_Q, LENGTH_K, device=str(device), BLOCK_SIZE=1024
        ),
        True,
    ),
    "of a dense mask": (lambda device: BlockMask.from_dense(visible(device)[None, None], 1 << 40), True),
    "of a mask_mod": (
        lambda device: BlockMask.from_mask_mod(
            causal, LENGTH_Q, LENGTH_K, block_size=(1 << 40, 16), device=device
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_large_blocks_mean_what_small_ones_do(device: torch.device, name: str) -> None:
    make, hides = MASKS[name]
    q, k, v = (leaf(2, 4, n, 16, device=device) for n in (LENGTH_Q, LENGTH_K, LENGTH_K))
    options: dict[str, Any] = {"attn_mask": visible(device)} if hides else {}
    out = tilewise.attention(q, k, v, block_mask=make(device))
    expected = tilewise.attention(q, k, v, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    cotangent = [torch.randn_like(out)]
    for found, right in zip(
        gradients([out], (q, k, v), cotangent), gradients([expected], (q, k, v), cotangent), strict=True
    ):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


def test_one_mask_serves_attention_of_several_lengths() -> None:
    mask = flex_attention._create_empty_block_mask(torch.zeros(1), torch.zeros(1))
    for length in (5, 300, 5):
        q, k, v = torch.randn(3, 1, 2, length, 8)
        torch.testing.assert_close(tilewise.attention(q, k, v, block_mask=mask), tilewise.attention(q, k, v))


def test_blocks_without_a_length_ask_for_one() -> None:
    mask = one_block("cpu", BLOCK_SIZE=1 << 30, mask_mod=causal)
    with pytest.raises(tilewise.InvalidArgument, match="length_q: expected the length of the attention"):
        BlockMask.from_torch(mask)
    ours = BlockMask.from_torch(mask, LENGTH_Q, LENGTH_K)
    assert torch.equal(ours.to_dense(LENGTH_Q, LENGTH_K)[0, 0], visible("cpu"))


def test_a_dense_mask_of_large_blocks_is_as_large_as_it_says() -> None:
    ours = BlockMask(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        block_q=1 << 30,
        block_k=1 << 30,
    )
    assert ours.to_dense(LENGTH_Q, LENGTH_K).shape == (1, 1, LENGTH_Q, LENGTH_K)
    assert ours.to_dense(LENGTH_Q, LENGTH_K).all()
