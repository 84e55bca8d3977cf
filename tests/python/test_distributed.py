"""Attention over several processes against one. gloo stands in for NCCL; the code above it is the same."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import distributed_cases as cases
import pytest
import tilewise
import torch
import torch.distributed as dist
from ranks import Ranks
from tilewise import distributed
from tilewise.distributed import agreement, messages, pieces
from tilewise.distributed import plan as plan_module
from tilewise.distributed.attention import METHODS
from tilewise.distributed.blocks import Blocks
from tilewise.distributed.heads import LEAST_ROWS
from tilewise.distributed.pieces import Heads
from tilewise.distributed.plan import Band, Grid, Plan, rows_of_ranks
from tilewise.distributed.ring import add_parcel, pack, unpack

LONG = "TILEWISE_LONG_TESTS" in os.environ
SIZES = [2, 4, 3, 6] if LONG else [2, 4]
CASES = 200 if LONG else 30


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(request.param, str(tmp_path_factory.mktemp("store") / "store"))
    yield pool
    pool.close()


def _fails(found: list[str | None]) -> list[str]:
    return [text for text in found if text is not None]


def test_ranks_give_what_one_process_gives(ranks: Ranks) -> None:
    for seed in range(CASES):
        assert not _fails(ranks.run(cases.check_exact, seed, ranks.size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_are_within_the_contract(ranks: Ranks, dtype: torch.dtype) -> None:
    for seed in range(1000, 1000 + CASES // 3):
        assert not _fails(ranks.run(cases.check_contract, seed, ranks.size, dtype))


def test_ranks_under_a_block_mask_give_what_one_process_gives(ranks: Ranks) -> None:
    for seed in range(CASES):
        assert not _fails(ranks.run(cases.check_exact, seed, ranks.size, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_under_a_block_mask_are_within_the_contract(ranks: Ranks, dtype: torch.dtype) -> None:
    for seed in range(1000, 1000 + CASES // 3):
        assert not _fails(ranks.run(cases.check_contract, seed, ranks.size, dtype, True))


WRONG = {
    "batch": r"query: expected the same on all .*\[2, 2, 4\].*, got .*\[3, 2, 4\].* on rank",
    "length": r"query: expected lengths \[2, .*\] on the ranks, as in layout, got",
    "option": r"options: expected the same on all ranks, .*'is_causal': False.*, got .*True",
    "lse": r"options: expected the same on all ranks, .*return_lse=False.*, got .*return_lse=True",
    "method": r"method: expected the same on all ranks, ring as on rank 0, got gather on",
    "layout": r"layout: expected a Layout or one of 'contiguous', .*, got 3",
    "layout size": r"layout: expected a layout for the mesh's \d ranks, got one for \d",
    "mesh": r"mesh: expected 1 dimension for method 'ring', got 2",
    "mesh kind": r"mesh: expected a DeviceMesh, a process group or None, got int",
    "mask": r"attn_mask: expected all \d+ keys of the sequence, or 1, got \[1, 1, 1, 5\]",
    "mask gradient": r"attn_mask: expected the same on all ranks, .*False.*, got .*True.* on rank \d",
    "meta": r"query: expected a tensor with memory, got a meta tensor",
    "sums": r"sinks: expected a DTensor that is replicated or sharded by heads, got .*Parti",
    "one DTensor": r"logit_scale: expected a Tensor like query, got a DTensor",
    "mask of DTensors": r"attn_mask: expected a Tensor with this rank.s part, got a DTen",
    "placement of sinks": r"options: expected the same on all ranks, .*Replicate.*, got .*Shard",
    "head dim": r"query: expected a DTensor replicated or sharded along dimensions 0 to 2, got .*dim=3",
    "heads": r"query: expected a DTensor sharded along dimension 2, got .*dim=1",
    "heads on one": r"rank \d raised InvalidArgument: query: expected a DTensor sharded along dimension 2",
    "parts of sums": r"query: expected a DTensor replicated or sharded along dimensions 0 to 2, got .*Part",
    "starts": r"rank \d raised TypeError: cu_seqlens_q\[1\]: expected int, got float",
    "starts kind": r"rank \d raised TypeError: cu_seqlens_q: expected a Tensor of rank 1 ",
    "starts fall": r"cu_seqlens_q: expected a first entry of 0 and entries that do not decr",
    "starts of keys": r"cu_seqlens_k: expected as many entries as cu_seqlens_q, 3, got 2",
    "starts end": r"cu_seqlens_q: expected a last entry of \d+, the tokens of all ranks, ",
    "query alone": r"key: expected a DTensor with the mesh and placements of query, .*, got Tensor",
    "key alone": r"key: expected a Tensor like query, got a DTensor",
    "placements": r"value: expected a DTensor with the mesh and placements of query, .*, got .*Repl",
    "whole rows": r"query: expected a DTensor sharded along dimension 2, got .*Replicate",
    "other mesh": r"sinks: expected a DTensor on query's mesh, .*, got DeviceMesh",
    "one mask row": r"attn_mask: expected one row per query, .*, or one row on every rank, ",
    "method name": r"rank \d raised InvalidArgument: method: expected one of 'ring', ",
    "hybrid": r"rank \d raised InvalidArgument: mesh: expected 2 dimensions for meth",
    "dimensions": r"rank \d raised InvalidArgument: mesh: expected 1 dimension for method ",
    "layout name": r"layout: expected a Layout or one of 'contiguous', .*, got 'spiral'",
    "steps": r"layout: expected queries and keys in equal steps, or one of them in steps o",
    "blocks": r"block_mask: expected the same on all ranks, None as on rank 0, got a mask on rank",
    "other blocks": r"block_mask: expected the same on all ranks, as on rank 0, got another one on rank",
    "blocks of fewer": r"block_mask.length_q: expected the length of query, \d+, got 2",
    "blocks on one": r"rank \d raised InvalidArgument: block_mask.length_q: expected the length of query",
    "blocks of a rank": r"block_mask.counts: expected .* and \d query blocks, got int32\[1, 1, 1\]",
    "blocks beyond": r"block_mask.indices: expected key blocks from 0 to \d, got",
    "blocks of lists": r"rank \d raised TypeError: block_mask.counts: expected Tensor, got list",
    "meta blocks": r"block_mask.counts: expected a tensor with memory, got a meta tensor",
    "kind of blocks": r"rank \d raised InvalidArgument: block_mask: expected tilewise.BlockMask or tor",
    "heads of blocks": r"block_mask.counts: expected \[B\|1, Hq\|1, query blocks\] with B 2, Hq 2 and",
    "whole": r"whole: expected 8 tokens along dimension 0, got \[9\]",
    "local": r"local: expected 2 tokens along dimension 0, got 3",
    "cut": r"layout: expected a layout for the mesh's \d ranks, got one for \d",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_one_error_on_every_rank(ranks: Ranks, name: str) -> None:
    texts = ranks.run(cases.wrong_use, name)
    assert len(set(texts)) == 1, texts
    assert re.match(f"InvalidArgument: {WRONG[name]}", texts[0]), texts[0]


@pytest.mark.parametrize("method", METHODS)
def test_arguments_are_checked_as_by_attention_on_every_rank(ranks: Ranks, method: str) -> None:
    for wrong in ranks.run(cases.wrong_arguments, method):
        assert not wrong


def test_a_rank_outside_of_a_mesh_is_told(ranks: Ranks) -> None:
    *inside, last = ranks.run(cases.outside)
    two = "InvalidArgument: mesh: expected 1 dimension, got 2"
    assert all(texts == ["nothing was raised"] * 4 + [two] for texts in inside)
    assert last == [
        "InvalidArgument: mesh: expected a mesh that includes this rank, got one without it"
    ] * 4 + [two]


@pytest.mark.parametrize("name", ["silent", "_forward", "_backward"])
def test_a_rank_that_fails_is_a_time_out_with_its_cause(ranks: Ranks, name: str) -> None:
    own, *others = ranks.run(cases.broken_rank, name)
    assert own == ("did not call" if name == "silent" else "DeviceError: a kernel failed")
    cause = "rank 0 raised DeviceError: a kernel failed"
    if name == "silent":
        cause = "another rank raised, ended or took longer than the process group's time-out"
    for text in others:  # some of them wait for others that have given up before
        assert text.startswith("DeviceError: a message between ranks failed: ") and cause in text, text


def test_a_group_of_one_is_attention_bit_for_bit(ranks: Ranks) -> None:
    assert all(ranks.run(cases.alone_like_attention))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_dtensors_along_the_sequence(ranks: Ranks, method: str) -> None:
    assert all(ranks.run(cases.of_dtensors, method))


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(("method", "by_heads"), [("ring", False), ("ulysses", False), ("ring", True)])
def test_what_heads_have_may_be_dtensors(ranks: Ranks, method: str, by_heads: bool, sharded: bool) -> None:
    assert not any(ranks.run(cases.per_head_dtensors, method, by_heads, sharded))


def test_a_block_mask_of_dtensors_has_the_heads_of_the_rank(ranks: Ranks) -> None:
    assert all(ranks.run(cases.blocks_of_dtensors))


def test_slopes_of_entries_follow_the_batch_of_a_mesh(ranks: Ranks) -> None:
    assert all(ranks.run(cases.entries_over_a_mesh))


def test_starts_may_be_a_tensor(ranks: Ranks) -> None:
    assert all(ranks.run(cases.starts_in_a_tensor))


def test_ranks_need_not_compare_what_they_were_given(ranks: Ranks) -> None:
    assert all(ranks.run(cases.without_validation))


@pytest.mark.parametrize("method", METHODS)
def test_losses_of_ranks_may_be_of_different_results(ranks: Ranks, method: str) -> None:
    assert all(ranks.run(cases.partial_losses, method))


@pytest.mark.parametrize(("balanced", "compiled"), [(True, False), (False, False), (True, True)])
def test_torchs_context_parallel_may_be_on_tilewise(ranks: Ranks, balanced: bool, compiled: bool) -> None:
    if compiled and ranks.size != 2:
        pytest.skip("compiling takes long, and is the same for any number of ranks")
    assert all(ranks.run(cases.torch_context_parallel, balanced, compiled))


def test_tilewise_is_not_switched_on_inside_torchs_context_parallel(ranks: Ranks) -> None:
    for text in ranks.run(cases.use_inside_context_parallel):
        assert text == (
            "Unsupported: sdpa: torch's context_parallel is on; switch Tilewise on around it, not inside"
        )


OF_ATTENTION = ["entries", "heads", "mask", "mask of heads", "sinks", "logit scale", "logit scale of heads"]
OF_LAYERS = ["rope", "rms_norm", "layer_norm", "columns", "summands", "ffn"]


@pytest.mark.parametrize("name", OF_ATTENTION + OF_LAYERS)
def test_operators_run_on_shards(ranks: Ranks, name: str) -> None:
    if ranks.size not in (2, 4):
        pytest.skip("heads do not divide")
    assert not any(ranks.run(cases.sharded_operator, name))


def test_parallelize_module_splits_a_layer_over_its_heads(ranks: Ranks) -> None:
    if ranks.size not in (2, 4):
        pytest.skip("heads do not divide")
    assert all(ranks.run(cases.parallelized_attention))


def test_parallelize_module_splits_a_whole_transformer_layer(ranks: Ranks) -> None:
    if ranks.size not in (2, 4):
        pytest.skip("heads do not divide")
    assert not any(ranks.run(cases.parallelized_layer))


@pytest.mark.parametrize("paged", [False, True])
def test_a_parallelized_layer_keeps_the_keys_of_its_heads(ranks: Ranks, paged: bool) -> None:
    if ranks.size not in (2, 4):
        pytest.skip("heads do not divide")
    assert not any(ranks.run(cases.parallelized_cache, paged))


@pytest.mark.parametrize("name", cases.INTO_CACHE)
def test_caches_on_shards_are_written_in_place(ranks: Ranks, name: str) -> None:
    if ranks.size not in (2, 4):
        pytest.skip("heads do not divide")
    assert not any(ranks.run(cases.rope_into_shards, name))


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_that_cannot_be_written_in_place_is_refused(ranks: Ranks, paged: bool) -> None:
    for text in ranks.run(cases.rope_into_wrong_shards, paged):
        assert "k_cache: expected k_cache and v_cache replicated or sharded alike, by heads or, " in text


@pytest.mark.parametrize(("method", "compiled"), [("ring", False), ("gather", True)])
def test_a_hugging_face_decoder_over_ranks(ranks: Ranks, method: str, compiled: bool) -> None:
    pytest.importorskip("transformers")
    if compiled and ranks.size != 2:
        pytest.skip("compiling takes long, and is the same for any number of ranks")
    assert all(ranks.run(cases.hugging_face_decoder, method, compiled))


def test_a_decoder_over_ranks_refuses_what_would_be_wrong(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for found in ranks.run(cases.wrong_decoders):
        assert found == {
            "positions": "InvalidArgument: position_ids",
            "labels": "InvalidArgument: shift_labels",
            "cache": "Unsupported: past_key_values: a cache",
            "padding": "Unsupported: attention_mask: padding",
            "mask": "Unsupported: attention_mask: a mask of one's own",
            "shifted": "nothing was raised",
            "by place": "nothing was raised",
            "elsewhere": "nothing was raised",
        }


def test_the_example_learns_as_one_process_does(ranks: Ranks) -> None:
    for together, alone in ranks.run(cases.example_losses, "ring"):
        assert together == pytest.approx(alone, rel=1e-5)
        assert together[-1] < together[0]


# Plans, which need no ranks


def _plan(layout: distributed.Layout, rank: int, band: Band) -> Plan:
    rows = rows_of_ranks(layout, (0, layout.length))
    return Plan.of(rank, rows, rows, band)


def test_a_window_talks_to_its_neighbour_alone() -> None:
    plan = _plan(distributed.contiguous(64, 8), 3, Band(left=5, right=0))
    assert [parcel.count for parcel in plan.received] == [0, 0, 5, 0, 0, 0, 0, 0]
    assert [parcel.count for parcel in plan.sent] == [0, 0, 0, 0, 5, 0, 0, 0]


def test_what_sees_nothing_is_neither_sent_nor_computed() -> None:
    plan = _plan(distributed.contiguous(64, 4), 1, Band(right=0))
    assert [parcel.count for parcel in plan.received] == [16, 0, 0, 0]
    assert [len(pairs) for pairs in plan.pairs] == [1, 0, 0, 0]


def _grid(mask: torch.Tensor, block: int) -> Grid:
    return Blocks.of(tilewise.BlockMask.from_dense(mask[None, None], block), *mask.shape).grid(slice(0, 1))


def _documents_mask(length: int, each: int) -> torch.Tensor:
    document = torch.arange(length) // each
    return document[:, None] == document


def test_what_a_block_mask_hides_is_neither_sent_nor_computed() -> None:
    rows = rows_of_ranks(distributed.contiguous(64, 4), (0, 64))
    grid = _grid(_documents_mask(64, 24), 8)  # documents of 24, 24 and 16 tokens; ranks have 16
    plans = [Plan.of(rank, rows, rows, Band(), grid) for rank in range(4)]
    received = [[parcel.count for parcel in plan.received] for plan in plans]
    assert received == [[0, 8, 0, 0], [16, 0, 16, 0], [0, 8, 0, 0], [0, 0, 0, 0]]
    assert [[parcel.count for parcel in plan.sent] for plan in plans] == [
        list(x) for x in zip(*received, strict=True)
    ]
    pairs = [pair for plan in plans for of in (plan.own, *plan.pairs) for pair in of]
    assert sum(pair.q.count * pair.k.count for pair in pairs) < 64 * 64 / 2


def test_a_grid_is_of_the_heads_that_are_asked() -> None:
    dense = torch.stack([torch.ones(8, 8).tril(), torch.ones(8, 8).triu(), torch.ones(8, 8)]).bool()
    blocks = Blocks.of(tilewise.BlockMask.from_dense(dense[None], 4), 8, 8)
    lower, upper, both = (blocks.grid(slice(*at)) for at in ((0, 1), (1, 2), (0, 2)))
    assert lower.some.tolist() == [[True, False], [True, True]]
    assert upper.some.tolist() == [[True, True], [False, True]]
    assert both.some.all() and not both.full.any()
    assert blocks.grid(slice(2, 3)).full.all() and not blocks.grid(slice(3, 3)).some.any()
    assert blocks.grid(slice(0, 1)) is lower


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", [distributed.contiguous, distributed.zigzag, distributed.striped])
@pytest.mark.parametrize("together", [1, 16, 2048])
@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(left=9, right=3)])
def test_pieces_of_a_block_mask_have_what_it_shows_once(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    kind: Callable[[int, int], distributed.Layout],
    together: int,
    band: Band,
) -> None:
    monkeypatch.setattr(plan_module, "ROWS_TOGETHER", together)
    block, rows = 8, rows_of_ranks(kind(50, ranks), (0, 50))
    mask = (torch.rand(50, 50) < 0.5) & (torch.rand(7, 7) < 0.5).kron(torch.ones(8, 8)).bool()[:50, :50]
    mask[16:32, 8:24] = True
    blocks = Blocks.of(tilewise.BlockMask.from_dense(mask[None, None], block), 50, 50)
    here = torch.zeros(50, 50, dtype=torch.int64)
    for rank in range(ranks):
        plan = Plan.of(rank, rows, rows, band, blocks.grid(slice(0, 1)))
        for pair in (pair for of in (plan.own, *plan.pairs) for pair in of):
            q, k = (torch.arange(x.begin, x.last + 1, x.step) for x in (pair.q, pair.k))
            seen = mask[q][:, k]
            inside = blocks.of_piece(pair.q, pair.k, slice(0, 1))[0, 0]
            assert torch.equal(inside, seen) and (pair.hidden or seen.all())
            here[q[:, None], k] += 1
    assert here.max() <= 1
    distance = torch.arange(50) - torch.arange(50)[:, None]
    assert here[mask & (distance <= band.right) & (distance >= -band.left)].all()


@pytest.mark.parametrize("seed", range(20))
def test_a_parcel_is_unpacked_without_a_copy_and_added_where_it_came_from(seed: int) -> None:
    print(f"seed {seed}")
    draw = torch.Generator().manual_seed(seed)
    size, dim_k, dim_v, any_number = (int(torch.randint(2, 6, (), generator=draw)) for _ in range(4))
    kind = (distributed.zigzag, distributed.striped, distributed.contiguous)[seed % 3]
    layout = kind(8 * size + 3 * size, size) if seed % 2 else kind(8 * size, size)
    band = Band(left=9, right=0) if seed % 4 == 0 else Band(right=0)
    sent = {sender: _plan(layout, sender, band).sent for sender in range(size)}
    parcels = [(sender, parcel) for sender in sent for parcel in sent[sender] if parcel.rows]
    sender, parcel = parcels[any_number % len(parcels)]
    length = layout.lengths[sender]
    k, v = (torch.randn(2, 3, length, dim, generator=draw) for dim in (dim_k, dim_v))
    flat = pack(parcel, k, v)
    at = torch.cat([torch.arange(length)[rows.at] for rows in parcel.rows])
    sums = [torch.zeros_like(x) for x in (k, v)]
    add_parcel(parcel, flat, *sums)
    for part, x, total in zip(unpack(parcel, flat, k, v), (k, v), sums, strict=True):
        assert torch.equal(part, x[:, :, at])
        assert part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert torch.equal(total[:, :, at], x[:, :, at])
        assert total.count_nonzero() == x[:, :, at].count_nonzero()


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_piece_begins_when_the_results_of_the_one_before_are_gone(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    calls = []

    def watched(operator: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        def call(*arguments: object, **options: object) -> Sequence[torch.Tensor]:
            assert all(result() is None for result in alive)
            results = operator(*arguments, **options)
            alive[:] = [weakref.ref(x) for x in results]
            calls.append(operator)
            return results

        return call

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(pieces, name, watched(getattr(pieces, name)))
    rows = [torch.randn(20, 2, 4, requires_grad=True) for _ in range(3)]
    starts = [0, 5, 12, 20]  # a piece for each sequence
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        distributed.attention_varlen(*rows, starts, is_causal=True, method=method).sum().backward()
    finally:
        dist.destroy_process_group()
    assert len(calls) == 6


@pytest.mark.parametrize(
    "heads", [Heads(0, 12, 12, 3), Heads(4, 3, 12, 3), Heads(2, 1, 12, 4), Heads(5, 0, 12, 4)]
)
def test_parts_of_heads_have_each_of_them_once(heads: Heads) -> None:
    here, keys = list(range(12))[heads.at], list(range(12))[heads.keys]
    for count in range(6):
        parts = heads.parts(count)
        assert len(parts) == max(1, min(count, len(keys)))
        places = [heads.places(part) for part in parts]
        assert [n for at, _ in places for n in here[at]] == here
        assert [n for _, at in places for n in keys[at]] == keys
        for part, (at, keys_at) in zip(parts, places, strict=True):
            assert here[at] == list(range(12))[part.at]
            assert keys[keys_at] == list(range(12))[part.keys]


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_heads_of_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    heads: list[tuple[int, int]] = []

    def watched(operator: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        def call(*arguments: Any, **options: Any) -> Sequence[torch.Tensor]:
            query, key = arguments[-3:-1]
            heads.append((query.shape[1], key.shape[1]))
            return operator(*arguments, **options)

        return call

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(pieces, name, watched(getattr(pieces, name)))
    rows = [torch.randn(2, n, 20, 4, requires_grad=True) for n in (6, 3, 3)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for least, expected in ((2 * 6 * 20, [(6, 3)]), (2 * 2 * 20, [(2, 1)] * 3)):
            monkeypatch.setitem(LEAST_ROWS, "cpu", least)
            heads.clear()
            distributed.attention(*rows, enable_gqa=True, method=method).sum().backward()
            assert heads == expected * 2
    finally:
        dist.destroy_process_group()


def _pairs(plan: Plan, causal: bool) -> int:
    pairs = [pair for of in (plan.own, *plan.pairs) for pair in of]
    positions = [
        (range(p.q.begin, p.q.last + 1, p.q.step), range(p.k.begin, p.k.last + 1, p.k.step)) for p in pairs
    ]
    return sum(j <= i or not causal for queries, keys in positions for i in queries for j in keys)


@pytest.mark.parametrize("layout", [distributed.zigzag(64, 4), distributed.striped(64, 4)])
def test_causal_work_is_the_same_for_all_ranks(layout: distributed.Layout) -> None:
    work = [_pairs(_plan(layout, rank, Band(right=0)), causal=True) for rank in range(4)]
    assert sum(work) == 64 * 65 // 2
    assert max(work) - min(work) <= 64 // 4 * 3  # in stripes ranks differ by one key a query


def test_balanced_layouts_are_balanced_by_pairs() -> None:
    cu_seqlens = [0, 50, 60, 128]
    pairs = distributed.count_pairs(128, 8, is_causal=True, cu_seqlens=cu_seqlens)
    assert sum(pairs) == sum(n * (n + 1) // 2 for n in (50, 10, 68))
    layout = distributed.balanced(pairs, 8, 128, 4)
    work = [sum(pairs[p // 8] for p in layout.positions(rank)[::8].tolist()) for rank in range(4)]
    assert layout.lengths == (32,) * 4
    assert max(work) <= 1.1 * sum(pairs) / 4


def test_a_layout_with_a_token_twice_is_refused() -> None:
    with pytest.raises(
        tilewise.InvalidArgument, match="layout: expected each of 4 tokens on exactly one rank"
    ):
        distributed.Layout(4, ((distributed.Span(0, 3),), (distributed.Span(2, 4),)))


BAD_LAYOUTS: dict[str, tuple[Callable[[], object], str]] = {
    "no ranks": (lambda: distributed.Layout(4, ()), "layout: expected one rank or more, got none"),
    "no step": (
        lambda: distributed.Layout(4, ((distributed.Span(0, 4, 0),),)),
        "layout: expected spans that start at 0 or above, in steps of 1 or more, got Span",
    ),
    "rank below 0": (lambda: distributed.zigzag(8, 2).positions(-1), "rank: expected one of the 2 ranks"),
    "rank beyond": (
        lambda: distributed.shard(torch.zeros(8), distributed.zigzag(8, 2), 2, 0),
        "rank: expected one of the 2 ranks, counted from 0, got 2",
    ),
    "zigzag over none": (lambda: distributed.zigzag(8, 0), "ranks: expected at least 1, got 0"),
    "runs over none": (lambda: distributed.contiguous(8, 0), "ranks: expected at least 1, got 0"),
    "stripes over less": (lambda: distributed.striped(8, -1), "ranks: expected at least 1, got -1"),
    "length below 0": (lambda: distributed.contiguous(-3, 2), "length: expected at least 0, got -3"),
    "zigzag below 0": (lambda: distributed.zigzag(-3, 2), "length: expected at least 0, got -3"),
    "no block": (lambda: distributed.balanced([1, 2], 0, 8, 2), "block: expected at least 1, got 0"),
    "other blocks": (
        lambda: distributed.balanced([1, 2, 3], 4, 8, 2),
        "pairs: expected one number for each of 2 blocks, got 3",
    ),
    "no starts": (lambda: distributed.documents([], 2), "cu_seqlens: expected a first entry of 0"),
    "starts fall": (lambda: distributed.documents([0, 5, 3], 2), "cu_seqlens: expected a first entry of 0"),
    "count in no block": (lambda: distributed.count_pairs(8, 0), "block: expected at least 1, got 0"),
    "count beyond": (
        lambda: distributed.count_pairs(8, 4, cu_seqlens=torch.tensor([0, 3])),
        "cu_seqlens: expected a last entry of 8, the length, got 3",
    ),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_a_bad_layout_is_named(name: str) -> None:
    make, message = BAD_LAYOUTS[name]
    with pytest.raises(tilewise.InvalidArgument, match=re.escape(message)):
        make()


def test_a_start_between_two_tokens_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens\[1\]: expected int, got float"):
        distributed.documents([0, 2.5, 4], 2)  # type: ignore[list-item]


def test_a_sequence_without_tokens_has_a_layout() -> None:
    pairs = distributed.count_pairs(0, 4)
    for layout in (distributed.balanced(pairs, 4, 0, 2), distributed.zigzag(0, 2)):
        assert layout.lengths == (0, 0)


@pytest.mark.parametrize("window", [(3, None), (3, 1), (None, 2), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_pairs_are_counted_as_a_window_leaves_them(
    window: tuple[int | None, int | None], is_causal: bool
) -> None:
    left, right = window
    far = 0 if is_causal else 20 if right is None else right
    seen = [
        sum(1 for j in range(20) if i - (20 if left is None else left) <= j <= i + far) for i in range(20)
    ]
    expected = [sum(seen[n : n + 6]) for n in range(0, 20, 6)]
    assert distributed.count_pairs(20, 6, is_causal=is_causal, window=window) == expected


def test_a_call_without_process_groups_says_what_is_missing() -> None:
    rows = [torch.zeros(1, 1, 2, 4)] * 3
    with pytest.raises(tilewise.InvalidArgument, match=r"mesh: .*call init_process_group first"):
        distributed.attention(*rows)


@pytest.mark.parametrize("module", ["layout", "sharding"])
def test_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"tilewise.distributed.{module}"))
    assert found.attempted and not found.failed


def test_a_missing_numpy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's exchange of objects needs it, and its own words would be those of a message that failed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "numpy" else found(name, *more)
    )
    boxes = [messages.Mailbox(None)]
    with pytest.raises(tilewise.Unsupported, match=r"distributed: .*NumPy, .*: pip install numpy"):
        agreement.agree(boxes, pytest.fail, exchange=True)
