"""tilewise.masks: what each mask shows, attention under it, and documents as packed sequences."""

from __future__ import annotations

import dataclasses
import doctest
import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from conftest import HQ, B, assert_within_contract, check_against, rows
from tilewise import BlockMask, attention, masks, reference
from torch import Tensor

LENGTH = 60  # the number of tokens in all masks below
LENGTHS = [17, 1, 0, 30, 12]
DOCUMENT = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)


def same_document() -> Tensor:
    return DOCUMENT[:, None] == DOCUMENT


def shared_prompt() -> Tensor:
    response = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 9, 1, 30]))
    return (KEY <= QUERY) & ((KEY < 20) | (response[:, None] == response))


def neighbours(extents: tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    i, j = QUERY, KEY
    for extent, size in zip(reversed(extents), reversed(kernel), strict=True):
        first = (i % extent - size // 2).clamp(0, extent - size)
        seen &= (j % extent >= first) & (j % extent < first + size)
        i, j = i // extent, j // extent
    return seen


MASKS: dict[str, tuple[Callable[..., BlockMask], Callable[[], Tensor]]] = {
    "documents": (functools.partial(masks.documents, LENGTHS), same_document),
    "causal documents": (
        functools.partial(masks.documents, LENGTHS, causal=True),
        lambda: same_document() & (KEY <= QUERY),
    ),
    "prefix": (functools.partial(masks.prefix, LENGTH, 23), lambda: (KEY < 23) | (KEY <= QUERY)),
    "shared prompt": (functools.partial(masks.shared_prompt, 20, [9, 1, 30]), shared_prompt),
    "block-causal": (functools.partial(masks.block_causal, LENGTH, 7), lambda: KEY // 7 <= QUERY // 7),
    "line": (functools.partial(masks.neighbourhood, LENGTH, 7), lambda: neighbours((60,), (7,))),
    "image": (
        functools.partial(masks.neighbourhood, (6, 10), (3, 5)),
        lambda: neighbours((6, 10), (3, 5)),
    ),
    "video": (functools.partial(masks.neighbourhood, (3, 4, 5), 2), lambda: neighbours((3, 4, 5), (2, 2, 2))),
}
every_mask = pytest.mark.parametrize("name", MASKS)


def with_lse(**options: Any) -> dict[str, Any]:
    options = {"enable_gqa": True, "return_lse": True} | options
    return {
        "ours": functools.partial(attention, **options),
        "reference": functools.partial(reference.attention, **options),
    }


# What they show


@every_mask
@pytest.mark.parametrize("size", [1, 8, (16, 5), 64, 1000])
def test_a_mask_shows_what_it_says(name: str, size: Any) -> None:
    make, dense = MASKS[name]
    mask = make(block_size=size)
    assert torch.equal(mask.to_dense(), dense()[None, None])
    assert mask.sparsity == pytest.approx(1 - dense().double().mean().item(), abs=1e-12)


@every_mask
def test_lists_are_those_of_the_dense_mask(name: str) -> None:
    make, dense = MASKS[name]
    ours, made = make(block_size=16), BlockMask.from_dense(dense()[None, None], block_size=16)
    for counts, indices in (("counts", "indices"), ("full_counts", "full_indices")):
        assert torch.equal(getattr(ours, counts), getattr(made, counts))
        slots = getattr(ours, indices).shape[-1]
        used = torch.arange(slots) < getattr(ours, counts)[..., None]
        assert torch.equal(getattr(ours, indices)[used], getattr(made, indices)[..., :slots][used])
    assert ours.tiles is not None and made.tiles is not None
    listed = int(ours.counts.sum()) > 0  # where no block is partial there is a tile that nobody names
    assert not listed or ours.tiles.shape == made.tiles.shape


def test_entries_have_masks_of_their_own() -> None:
    lengths = [[10, 50], [60], [20, 20, 20]]
    mask = masks.documents(lengths, causal=True, block_size=16)
    for entry, own in enumerate(lengths):
        alone = masks.documents(own, causal=True).to_dense()
        assert torch.equal(mask.to_dense()[entry : entry + 1], alone)
    prefixes = masks.prefix(LENGTH, torch.tensor([0, 23, 60]), block_size=16)
    for entry, own in enumerate((0, 23, 60)):
        assert torch.equal(prefixes.to_dense()[entry : entry + 1], masks.prefix(LENGTH, own).to_dense())


def test_a_long_mask_is_small() -> None:
    torch.manual_seed(0)
    cuts = torch.randperm(32767)[:63].sort().values + 1
    lengths = torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([32768])]))
    mask = masks.documents(lengths, causal=True)
    fields = ("counts", "indices", "full_counts", "full_indices", "tile_ids", "tiles")
    assert sum(getattr(mask, field).nbytes for field in fields) < 8e6  # the dense mask has 1 GB
    assert mask.length_q == mask.length_k == 32768


def test_a_mask_survives_pickling_and_moves() -> None:
    mask = pickle.loads(pickle.dumps(masks.documents(LENGTHS, block_size=16)))
    assert torch.equal(mask.to_dense(), same_document()[None, None])
    q = torch.randn(1, 2, LENGTH, 8)
    assert "packed" in tilewise.explain(q, q, q, block_mask=mask)
    moved = mask.to("meta")
    assert moved.counts.is_meta and moved.tiles.is_meta and moved.length_q == LENGTH
    assert repr(moved).startswith("BlockMask of 60 x 60")


def test_a_picture_of_many_blocks_is_small() -> None:
    lines = repr(masks.prefix(8192, 2048)).splitlines()
    assert len(lines) == 25 and all(len(line) == 47 for line in lines[1:])
    assert lines[1] == " ".join("######" + "." * 18) and lines[-1] == " ".join("#" * 23 + "+")
    assert repr(BlockMask(torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 1).int())).endswith("\n#\n#")


# Attention under them


@every_mask
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_outputs_and_gradients_are_within_the_contract(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    mask = MASKS[name][0](block_size=16).to(device)
    given = rows(dtype, device, sq=LENGTH, sk=LENGTH)
    check_against(**with_lse(block_mask=mask), rows=given, extra={})


# Documents as packed sequences

TOKENS = {  # how rows of two entries may lie
    "heads inside": lambda: [torch.randn(B, LENGTH, h, 8).transpose(1, 2) for h in (HQ, 2, 2)],
    "one projection": lambda: torch.randn(B, LENGTH, HQ + 4, 8).transpose(1, 2).split((HQ, 2, 2), 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal bottom right": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (5, 2)},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1, HQ)},
    "sinks": {"sinks": torch.linspace(-1, 1, HQ)},
}
ENTRIES = [LENGTHS, [LENGTHS, [60]]]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", TOKENS)
@pytest.mark.parametrize("lengths", ENTRIES, ids=["the same", "of each entry"])
def test_documents_run_as_packed_sequences(lengths: list[Any], layout: str, option: str) -> None:
    mask = masks.documents(lengths, block_size=16)
    q, k, v = TOKENS[layout]()
    options = OPTIONS[option] | {"block_mask": mask, "enable_gqa": True}
    said = tilewise.explain(q, k, v, **options)
    assert said.startswith("documents as packed sequences, without a block mask\nforward f32 packed")
    out, lse = attention(q, k, v, return_lse=True, **options)
    expected = reference.attention(q, k, v, return_lse=True, **options)
    math = reference.attention(q, k, v, return_lse=True, dtype=torch.float32, **options)
    for name, actual, exact, plain in zip(("out", "lse"), (out, lse), expected, math, strict=True):
        assert_within_contract(name, actual, exact, plain)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_have_the_gradients_of_the_block_mask(causal: bool) -> None:
    mask = masks.documents(LENGTHS, causal=causal, block_size=16)
    plain = dataclasses.replace(mask)  # knows of no documents
    q, k, v = rows(b=1, sq=LENGTH, sk=LENGTH)
    assert "packed" in tilewise.explain(q, k, v, block_mask=mask, enable_gqa=True)
    assert "dense" in tilewise.explain(q, k, v, block_mask=plain, enable_gqa=True)
    options = {"enable_gqa": True, "return_lse": True}
    check_against(
        functools.partial(attention, block_mask=mask, **options),
        functools.partial(reference.attention, block_mask=plain, **options),
        rows=[q, k, v],
        extra={},
    )


BLOCKED = {
    "another mask": lambda q: {"attn_mask": torch.zeros(LENGTH, LENGTH)},
    "dropout": lambda q: {"dropout_p": 0.1},
    "slopes of entries": lambda q: {"alibi_slopes": torch.rand(B, HQ)},
}


@pytest.mark.parametrize("why", [*BLOCKED, "layout"])
def test_documents_stay_a_block_mask_where_packing_would_mean_something_else(why: str) -> None:
    mask = masks.documents(LENGTHS, block_size=16)
    q, k, v = rows(sq=LENGTH, sk=LENGTH) if why == "layout" else TOKENS["heads inside"]()
    options = BLOCKED[why](q) if why in BLOCKED else {}
    assert "block mask" in tilewise.explain(q, k, v, block_mask=mask, enable_gqa=True, **options)
    check_against(**with_lse(block_mask=mask, **options), rows=[q, k, v], extra={})


def test_documents_compile_and_map() -> None:
    mask = masks.documents(LENGTHS, causal=True, block_size=16)
    q, k, v = torch.randn(3, 1, 4, LENGTH, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, block_mask=mask)

    expected = attend(q, k, v)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="eager")(q, k, v), expected)
    mapped = torch.func.vmap(attend)(*(x[None] for x in (q, k, v)))
    torch.testing.assert_close(mapped[0], expected, atol=2e-6, rtol=1e-5)


# Errors

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a negative length": (
        lambda: masks.documents([3, -1]),
        "lengths: expected 0 or above and below 2^31, got -1",
    ),
    "different sums": (
        lambda: masks.documents([[3, 4], [8]]),
        "lengths: expected the same sum in each entry, 7, got 8",
    ),
    "too long a prefix": (
        lambda: masks.prefix(8, 9),
        "prefix: expected a number from 0 to the length, 8, got 9",
    ),
    "no block": (lambda: masks.block_causal(8, 0), "block: expected 1 or above, got 0"),
    "too large a kernel": (
        lambda: masks.neighbourhood((8, 8), 9),
        "kernel: expected a number from 1 to the extent, 8, got 9",
    ),
    "a kernel of another rank": (
        lambda: masks.neighbourhood((8, 8), (3, 3, 3)),
        "kernel: expected as many numbers as extents, 2, got 3",
    ),
    "no block size": (lambda: masks.prefix(8, 2, block_size=0), "block_size: expected at least 1, got 0"),
    "no lengths": (
        lambda: BlockMask(torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 1).int()).sparsity,
        "length_q: expected a length, since the mask was made without one, got None",
    ),
    "another length": (
        lambda: attention(*torch.randn(3, 1, 2, 64, 8), block_mask=masks.documents([60], block_size=32)),
        "block_mask.length_q: expected the length of query, 64, got 60",
    ),
    "another length of keys": (
        lambda: attention(
            torch.randn(1, 2, 60, 8), *torch.randn(2, 1, 2, 64, 8), block_mask=masks.documents([60])
        ),
        "block_mask.length_k: expected the length of key, 64, got 60",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(tilewise.InvalidArgument) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("lengths", ["12", 5, [1.5], [[1], 2], None])
def test_lengths_of_another_type_are_named(lengths: Any) -> None:
    with pytest.raises(TypeError, match=r"^lengths: expected "):
        masks.documents(lengths)


@pytest.mark.parametrize("module", ["masks", "_block_picture", "_documents"])
def test_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"tilewise.{module}"))
    assert found.failed == 0
