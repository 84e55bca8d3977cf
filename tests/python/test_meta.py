"""Tensors without data are refused as others are, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from tilewise import InvalidArgument
from torch import Tensor
from torch._subclasses import FakeTensorMode


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(hkv: int = 4, sk: int = 7, d: int = 8) -> tuple[Tensor, ...]:
    return floats(2, 4, 5, 8), floats(2, hkv, sk, d), floats(2, hkv, sk, 8)


def tables() -> tuple[Tensor, Tensor]:
    return floats(16, 4), floats(16, 4)


def blocks() -> dict[str, Any]:
    return {"block_mask": tilewise.BlockMask(ints(1)[None, None], ints(0)[None, None, None], block_q=4)}


# What is called, with tensors of data, all of which are taken to be without.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "head dim": (tilewise.attention, rows(d=9), {}),
    "rank": (tilewise.attention, (floats(4, 5, 8), *rows()[1:]), {}),
    "type": (tilewise.attention, (rows()[0].half(), *rows()[1:]), {}),
    "integers": (tilewise.attention, (rows()[0].int(), *rows()[1:]), {}),
    "heads": (tilewise.attention, rows(hkv=2), {}),
    "mask": (tilewise.attention, rows(), {"attn_mask": floats(5, 6)}),
    "scale": (tilewise.attention, rows(), {"scale": float("nan")}),
    "window": (tilewise.attention, rows(), {"window": (-1, 0)}),
    "dropout": (tilewise.attention, rows(), {"dropout_p": 1.5}),
    "kernel": (tilewise.attention, rows(), {"kernel": "fast"}),
    "sinks": (tilewise.attention, rows(), {"sinks": floats(3)}),
    "logit scale": (tilewise.attention, rows(), {"logit_scale": floats(3)}),
    "slopes": (tilewise.attention, rows(), {"alibi_slopes": floats(3)}),
    "blocks": (tilewise.attention, rows(), blocks()),
    "sdpa": (tilewise.scaled_dot_product_attention, (floats(4, 5, 8), floats(4, 7, 9), floats(4, 7, 8)), {}),
    "varlen": (
        tilewise.attention_varlen,
        (floats(9, 4, 8), floats(9, 4, 8), floats(8, 4, 8), ints(0, 9), ints(0, 9), 9, 9),
        {},
    ),
    "lengths": (tilewise.attention_decode, (*rows(), ints(1, 2, 3)), {}),
    "pages": (tilewise.attention_decode, (*rows(), ints(1, 2), ints(0, 1)), {}),
    "linear": (tilewise.linear, (floats(3, 8), floats(6, 7)), {}),
    "bias": (tilewise.linear, (floats(3, 8), floats(6, 8), floats(5)), {}),
    "gate": (tilewise.linear, (floats(3, 8), floats(6, 8)), {"gate": floats(5, 8), "activation": "silu"}),
    "activation": (tilewise.linear, (floats(3, 8), floats(6, 8)), {"activation": "swish"}),
    "up": (tilewise.ffn, (floats(3, 8), floats(16, 7), floats(8, 16)), {}),
    "down": (tilewise.ffn, (floats(3, 8), floats(16, 8), floats(8, 15)), {}),
    "weight": (tilewise.rms_norm, (floats(3, 8), floats(7)), {}),
    "eps": (tilewise.layer_norm, (floats(3, 8), floats(8)), {"eps": -1.0}),
    "rope": (tilewise.apply_rope, (floats(2, 4, 5, 6), None, *tables()), {}),
    "positions": (tilewise.apply_rope, (floats(2, 4, 5, 8), None, *tables(), ints(1, 2)), {}),
    "cache": (
        tilewise.rope_into_cache,
        (*[floats(2, 4, 5, 8)] * 3, floats(2, 4, 16, 8), floats(2, 4, 15, 8), *tables()),
        {},
    ),
}


def converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, tilewise.BlockMask):
        counts, indices = convert(value.counts), convert(value.indices)
        return tilewise.BlockMask(counts, indices, block_q=value.block_q, block_k=value.block_k)
    return value


def raised(name: str, convert: Callable[[Tensor], Tensor]) -> str:
    call, arguments, options = CASES[name]
    arguments = tuple(converted(x, convert) for x in arguments)
    options = {key: converted(x, convert) for key, x in options.items()}
    with pytest.raises(InvalidArgument) as found:
        call(*arguments, **options)
    return str(found.value)


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_are_refused_as_others_are(name: str) -> None:
    assert raised(name, lambda x: x.to("meta")) == raised(name, lambda x: x)


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_are_refused_as_others_are(name: str) -> None:
    with FakeTensorMode() as mode:
        found = raised(name, mode.from_tensor)
    assert found == raised(name, lambda x: x)


def test_a_gradient_changes_nothing_about_it() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in rows(d=9))
    with pytest.raises(InvalidArgument, match="key: expected the head dim of query, 8"):
        tilewise.attention(q, k, v)


def test_sound_calls_have_the_shapes_they_would_have() -> None:
    q, k, v = (x.to("meta") for x in rows())
    out, lse = tilewise.attention(q, k, v, window=(1, 1), dropout_p=0.5, return_lse=True)
    assert out.shape == (2, 4, 5, 8) and lse.shape == (2, 4, 5) and out.is_meta
    assert tilewise.attention(q, k, v, is_causal=True, scale=0.5).shape == (2, 4, 5, 8)


def test_sizes_that_are_symbols_are_checked_for_the_call_that_is_traced() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tilewise.attention, backend="eager", dynamic=True)
    q, k, v = rows()
    assert compiled(q, k, v).shape == q.shape
    with pytest.raises(Exception, match="the head dim of q, 8"):
        compiled(q, floats(2, 4, 7, 9), v)
