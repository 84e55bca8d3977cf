"""Random problems for several ranks, and what one process makes of them. Runs in every worker process."""

from __future__ import annotations

import copy
import dataclasses
import random
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import tilewise
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import gradients
from contract import Tensors, assert_twice, moved
from programs import load
from test_properties import scaled_like_torch
from tilewise import distributed, reference
from tilewise.distributed import Layout, Span, pieces, plan
from tilewise.distributed.heads import LEAST_ROWS
from tilewise.integrations import sdpa
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask

FACTORS = {2: (2, 1), 4: (2, 2), 3: (3, 1), 6: (3, 2)}  # of a mesh for hybrid
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape)
    return _meshes[shape]


@dataclass
class Case:
    """A problem of the whole, its layouts and options. A function of its seed and of the number of ranks."""

    seed: int
    size: int
    dtype: torch.dtype
    method: str
    layout: Layout
    key_layout: Layout
    rows: list[Tensor]
    extra: dict[str, Tensor]  # with a gradient
    fixed: dict[str, Tensor]  # without
    options: dict[str, Any]
    starts: tuple[list[int], list[int]] | None = None  # of packed sequences
    in_parts: bool = False  # heads are computed in parts, as those of long sequences are
    block_mask: Any = None

    def __str__(self) -> str:
        shapes = [list(x.shape) for x in self.rows]
        return (
            f"seed {self.seed} on {self.size} ranks: {self.dtype} {self.method} {shapes} {self.options} "
            f"{[*self.extra, *self.fixed]} {self.starts} {self.in_parts} {self.layout.ranks} "
            f"{self.block_mask!r}"
        )


def _random_layout(rng: random.Random, length: int, size: int) -> Layout:
    kind = rng.choice(["contiguous", "zigzag", "striped", "balanced", "ragged"])
    if kind == "balanced":
        block = rng.choice([1, 3, 8])
        pairs = distributed.count_pairs(length, block, is_causal=rng.random() < 0.5)
        return distributed.balanced(pairs, block, length, size)
    if kind == "ragged":  # any cut, ranks without tokens too
        cuts = sorted(rng.randint(0, length) for _ in range(2 * size - 1))
        spans = [Span(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
        rng.shuffle(spans)
        return Layout(length, tuple(tuple(spans[rank::size]) for rank in range(size)))
    return getattr(distributed, kind)(length, size)


def _random_starts(rng: random.Random, length: int, count: int) -> list[int]:
    return [0, *sorted(rng.randint(0, length) for _ in range(count - 1)), length]


def draw_case(seed: int, size: int, dtype: torch.dtype) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    packed = rng.random() < 0.3
    heads_k = rng.choice([1, 2, 3])
    heads_q = heads_k * rng.choice([1, 2, 3])
    batch, dim, dim_v = rng.choice([1, 2]), rng.choice([5, 8, 16]), rng.choice([4, 8, 13])
    length_q = rng.randint(16, 48)
    other = rng.random() < 0.3
    length_k = rng.randint(16, 48) if other else length_q

    def numbers(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)

    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    causal = rng.random() < 0.5
    options: dict[str, Any] = dict(
        is_causal=causal,
        alignment=rng.choice(["top_left", "bottom_right"]),
        scale=rng.choice([None, 0.3]),
        softcap=rng.choice([0.0, 0.0, 4.0]),
        dropout_p=rng.choice([0.0, 0.0, 0.25]),
    )
    if rng.random() < 0.4:
        options["window"] = (rng.choice([None, 0, 3, 9]), rng.choice([None, 2, 7]))
    extra, fixed = {}, {}
    if rng.random() < 0.3:
        extra["sinks"] = numbers(heads_q, kind=statistics)
    if rng.random() < 0.3:
        fixed["alibi_slopes"] = numbers(heads_q, kind=statistics).abs() / 4
    starts = None
    if packed:
        count = rng.randint(1, 4)
        starts = (_random_starts(rng, length_q, count), _random_starts(rng, length_k, count))
        if not other:
            starts = (starts[0], starts[0])
        shapes = [(length_q, heads_q, dim), (length_k, heads_k, dim), (length_k, heads_k, dim_v)]
    else:
        shapes = [
            (batch, heads_q, length_q, dim),
            (batch, heads_k, length_k, dim),
            (batch, heads_k, length_k, dim_v),
        ]
        kind = rng.choice([None, None, "boolean", "additive", "additive"])
        of_mask = [rng.choice([1, n]) for n in (batch, heads_q, length_q, length_k)]
        if kind == "boolean":
            fixed["attn_mask"] = numbers(*of_mask, kind=torch.float64) > -0.8
        elif kind == "additive":
            # Shares of what all ranks have are summed up in the type they come in.
            kinds = [statistics] if of_mask[2] == 1 else [dtype, statistics]
            extra["attn_mask"] = numbers(*of_mask, kind=rng.choice(kinds))
    layout = _random_layout(rng, length_q, size)
    if packed and rng.random() < 0.5:
        assert starts is not None
        layout = distributed.documents(starts[0], size)
    key_layout = layout
    if other or rng.random() < 0.2:
        key_layout = _random_layout(rng, length_k, size)
    steps = {span.step for of in (layout, key_layout) for spans in of.ranks for span in spans}
    assert steps <= {1, size}
    method = rng.choice(["ring", "ring", "gather", "ulysses", "hybrid"])
    if method == "hybrid" and size not in FACTORS:
        method = "ring"
    rows = [numbers(*shape) for shape in shapes]
    if rng.random() < 0.4:
        extra["logit_scale"] = numbers(heads_q, kind=statistics)  # of either sign
    in_parts = rng.random() < 0.5
    if options["dropout_p"] and rng.random() < 0.2:
        options["dropout_p"] = 1.0
    return Case(seed, size, dtype, method, layout, key_layout, rows, extra, fixed, options, starts, in_parts)


def _torchs_mask(shape: tuple[int, int, int, int], size: tuple[int, int], seed: int) -> Any:
    """torch's BlockMask, in which each entry and head has its own rule."""
    shift = seed % 5

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + b + shift >= k) & ((q - k < 7 + 3 * h) | (k % 11 == 0))

    batch, heads = (None if n == 1 else n for n in shape[:2])
    return create_block_mask(mask_mod, batch, heads, *shape[2:], device="cpu", BLOCK_SIZE=size)


def draw_block_mask(rng: random.Random, shape: tuple[int, int, int, int], of_torch: bool = False) -> Any:
    """A block mask with hidden, full and partial blocks, of entries and heads or of all of them."""
    size = (rng.choice([1, 4, 8, 64]), rng.choice([1, 4, 8, 64]))
    batch, heads, length_q, length_k = (rng.choice([1, shape[0]]), rng.choice([1, shape[1]]), *shape[2:])
    seed = rng.randint(0, 1 << 30)
    if of_torch:
        return _torchs_mask((batch, heads, length_q, length_k), size, seed)
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block) for length, block in zip((length_q, length_k), size, strict=True)]
    kinds = torch.randint(3, (batch, heads, *blocks), generator=generator)
    spread = kinds.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, :length_q, :length_k]
    seen = torch.rand((batch, heads, length_q, length_k), generator=generator) < 0.7
    return tilewise.BlockMask.from_dense((spread == 2) | ((spread == 1) & seen), size)


def attend_whole(case: Case, attend: Any, rows: list[Tensor], extra: dict[str, Tensor], **more: Any) -> Any:
    """One process's (out, lse), by attention or by a function of the reference."""
    options = {**case.options, **case.fixed, **extra, **more}
    if case.block_mask is not None:
        options["block_mask"] = case.block_mask
    if case.starts is None:
        return attend(*rows, enable_gqa=True, return_lse=True, **options)
    starts = [torch.tensor(x, dtype=torch.int32) for x in case.starts]
    longest = [int(x.diff().max()) for x in starts]
    return attend(*rows, *starts, *longest, return_lse=True, **options)


def attend_ranks(case: Case, rank: int, rows: list[Tensor], extra: dict[str, Tensor]) -> Any:
    """This rank's (out, lse)."""
    named = {**case.fixed, **extra}
    mask = named.pop("attn_mask", None)
    shape = FACTORS.get(case.size, (case.size,)) if case.method == "hybrid" else (case.size,)
    common = dict(
        mesh=mesh_of(shape),
        method=case.method,
        layout=case.layout,
        key_layout=case.key_layout,
        return_lse=True,
        **case.options,
        **named,
    )
    if case.starts is None:
        return distributed.attention(*rows, mask, enable_gqa=True, block_mask=case.block_mask, **common)
    return distributed.attention_varlen(*rows, *case.starts, **common)


def _shared(case: Case, name: str) -> bool:
    """Whether every rank has a copy."""
    named = {**case.extra, **case.fixed}
    return name in ("sinks", "logit_scale", "alibi_slopes") or (
        name == "attn_mask" and named[name].shape[-2] == 1
    )


def _sharded(case: Case, name: str, x: Tensor, rank: int) -> Tensor:
    """A rank's part of what the whole was given, or of a gradient of it."""
    if _shared(case, name):
        return x
    layout = case.key_layout if name in ("key", "value") else case.layout
    along = 2 if name == "attn_mask" or case.starts is None else 0
    if name == "lse":
        along = -1
    return distributed.shard(x, layout, rank, along)


def _unsharded(case: Case, name: str, x: Tensor) -> Tensor:
    if _shared(case, name):
        whole = x.detach().clone()
        dist.all_reduce(whole)  # each rank has a share
        return whole
    layout = case.key_layout if name in ("key", "value") else case.layout
    along = 2 if name == "attn_mask" or case.starts is None else 0
    return distributed.unshard(x, layout, 2 if name == "lse" and case.starts is None else along)


def _cotangents(case: Case, out: Tensor, lse: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    found = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(case.dtype) for x in (out, lse)
    ]
    return [found[0], torch.where(lse.isinf(), 0.0, found[1]).detach()]


def run_ranks(case: Case, rank: int) -> Tensors:
    """out, lse and all gradients of the ranks, as whole tensors."""
    names = ["query", "key", "value", *case.extra]
    given = [*case.rows, *case.extra.values()]
    leaves = [
        _sharded(case, name, x, rank).detach().clone().requires_grad_()
        for name, x in zip(names, given, strict=True)
    ]
    fixed = dict(case.fixed)
    if "attn_mask" in fixed:
        fixed["attn_mask"] = _sharded(case, "attn_mask", fixed["attn_mask"], rank)
    local = Case(**{**case.__dict__, "fixed": fixed})
    torch.manual_seed(case.seed + 17 * rank)  # dropout is rank 0's
    together = random.Random(case.seed).choice([1, 16, plan.ROWS_TOGETHER])
    with (
        patch.dict(LEAST_ROWS, {"cpu": 1} if case.in_parts else {}),
        patch.object(plan, "ROWS_TOGETHER", together),
        patch.object(plan, "MOST_RUNS", 2 if together == 16 else 8),
    ):
        out, lse = attend_ranks(local, rank, leaves[:3], dict(zip(case.extra, leaves[3:], strict=True)))
    whole = [_unsharded(case, "out", out), _unsharded_lse(case, lse)]
    cotangents = _cotangents(case, *whole)
    local_cotangents = [
        _sharded(case, "out", cotangents[0], rank),
        distributed.shard(cotangents[1], case.layout, rank, cotangents[1].dim() - 1),
    ]
    found = gradients((out, lse), leaves, local_cotangents)
    results = dict(out=whole[0], lse=whole[1])
    for name, x in zip(names, found, strict=True):
        results[name] = _unsharded(case, name, x)
    return results


def _unsharded_lse(case: Case, lse: Tensor) -> Tensor:
    return distributed.unshard(lse, case.layout, lse.dim() - 1)


def run_whole(
    case: Case, attend: Any, values: list[Tensor], wide: torch.dtype | None, **more: Any
) -> Tensors:
    leaves = [x.detach().to(wide or x.dtype).requires_grad_() for x in values]
    torch.manual_seed(case.seed)
    out, lse = attend_whole(case, attend, leaves[:3], dict(zip(case.extra, leaves[3:], strict=True)), **more)
    found = gradients((out, lse), leaves, _cotangents(case, out, lse))
    names = ["out", "lse", "query", "key", "value", *case.extra]
    return {name: x.detach() for name, x in zip(names, (out, lse, *found), strict=True)}


def draw_masked_case(seed: int, size: int, dtype: torch.dtype) -> Case:
    """A case with a block mask, of each method in turn."""
    rng = random.Random(seed)
    case = next(
        found
        for n in range(1 << 20)
        if (found := draw_case(seed + (n << 20), size, dtype)).starts is None and found.rows[0].shape[2] > 0
    )
    methods = ["ring", "gather", "ulysses", *(["hybrid"] if size in FACTORS else [])]
    case.method = methods[seed % len(methods)]
    query, key, _ = case.rows
    shape = (*query.shape[:3], key.shape[2])
    case.block_mask = draw_block_mask(rng, shape, of_torch=seed % 3 == 0)
    return case


def check_exact(seed: int, size: int, masked: bool = False) -> str | None:
    """In float64 the ranks' results are those of one process. Gives what is wrong, if anything."""
    case = (draw_masked_case if masked else draw_case)(seed, size, torch.float64)
    rank = dist.get_rank()
    actual = run_ranks(case, rank)
    if rank != 0:
        return None
    attend = tilewise.attention if case.starts is None else tilewise.attention_varlen
    expected = run_whole(case, attend, [*case.rows, *case.extra.values()], None)
    for name, x in expected.items():
        if not torch.equal(actual[name].isinf(), x.isinf()):
            return f"{case}: {name} has other infinities"
        error = (actual[name] - x)[x.isfinite()].abs()
        if error.numel() and not error.max() <= 1e-12 * max(1.0, float(x[x.isfinite()].abs().max())):
            return f"{case}: {name} is off by {error.max():.3g}"
    return None


def check_contract(seed: int, size: int, dtype: torch.dtype, masked: bool = False) -> str | None:
    """In other types they are as near to the truth as the contract asks of one process."""
    case = (draw_masked_case if masked else draw_case)(seed, size, dtype)
    if case.starts is not None:
        case.options["dropout_p"] = 0.0  # the reference draws each sequence a mask of its own
    rank = dist.get_rank()
    actual = run_ranks(case, rank)
    if rank != 0:
        return None
    theirs = reference.attention if case.starts is None else reference.attention_varlen
    checked = set(actual)
    if case.options["is_causal"] and case.options.get("window", (None,))[0] == 0:
        # Every query sees one key. Its weight is 1 on ranks, too, but the gradient of its score is a rounding
        # where one process has 0: see test_the_gradient_of_an_only_key_is_a_rounding.
        checked -= {"query", "key", "attn_mask", "logit_scale"}

    def draw(n: int) -> tuple[Tensors, Tensors]:
        values = [moved(x, n) if n else x for x in (*case.rows, *case.extra.values())]
        exact = run_whole(case, theirs, values, torch.float64, dtype=torch.float64)
        plain = run_whole(case, scaled_like_torch(theirs), values, torch.float32, dtype=torch.float32)
        return exact, {name: plain[name] for name in checked}

    try:
        assert_twice({name: actual[name] for name in actual if name in checked}, draw)
    except AssertionError as error:
        return f"{case}: {error}"
    return None


# Wrong use


def _small(batch: int = 2, length: int = 2, **options: Any) -> Any:
    x = torch.randn(batch, 2, length, 4)
    return distributed.attention(x, x, x, **options)


def _small_dtensor(**options: Any) -> Any:
    x = distribute_tensor(torch.zeros(1, 2, 12, 4), mesh_of((dist.get_world_size(),)), [Shard(2)])
    return distributed.attention(x, x, x, **options)


def _placed(placement: Placement) -> Tensor:
    return DTensor.from_local(torch.zeros(2), mesh_of((dist.get_world_size(),)), [placement])


def _packed(starts: Any, starts_k: Any = None, **options: Any) -> Any:
    x = torch.zeros(2, 2, 4)
    return distributed.attention_varlen(x, x, x, starts, starts_k, **options)


def _of_placements(*placements: Placement | None) -> Any:
    """Of query, key and value; None is a Tensor that is none of DTensor's."""
    mesh, x = mesh_of((dist.get_world_size(),)), torch.zeros(1, 2, 12, 4)
    return distributed.attention(*(x if p is None else distribute_tensor(x, mesh, [p]) for p in placements))


def _elsewhere() -> Tensor:
    """Numbers of heads on another mesh than `_small_dtensor`'s."""
    size = dist.get_world_size()
    return DTensor.from_local(torch.zeros(2), mesh_of((size, 1)), [Replicate(), Replicate()])


def _dtensor(*placements: Placement) -> Tensor:
    """On a mesh of as many dimensions; where two, only the last is split."""
    size = dist.get_world_size()
    mesh = mesh_of((1,) * (len(placements) - 1) + (size,))
    return DTensor.from_local(torch.zeros(1, 2, 12, 12), mesh, placements)


def _error_of(call: Any) -> str:
    try:
        call()
    except (tilewise.Error, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _in_steps(step: int) -> Layout:
    """6 tokens to a rank, next to each other in the sequence, but not in the rank's memory."""
    ends = range(6, 6 * dist.get_world_size() + 1, 6)
    return Layout(ends[-1], tuple(tuple(Span(end - 6 + n, end, step) for n in range(step)) for end in ends))


def _blocks(length: int, **changes: Any) -> tilewise.BlockMask:
    """Causal, in blocks of 2."""
    mask = tilewise.BlockMask.from_dense(torch.ones(1, 1, length, length, dtype=torch.bool).tril(), 2)
    changed = {name: change(getattr(mask, name)) for name, change in changes.items()}
    return dataclasses.replace(mask, **changed)


def wrong_use(name: str) -> str:
    """The error that a wrong call raises on this rank."""
    size = dist.get_world_size()
    last = dist.get_rank() == size - 1
    attend = distributed.attention
    calls: dict[str, Any] = {
        "batch": lambda: _small(batch=3 if last else 2),
        "length": lambda: _small(length=5 if last else 2, layout=distributed.contiguous(2 * size, size)),
        "option": lambda: _small(is_causal=last),
        "lse": lambda: _small(return_lse=last),
        "method": lambda: _small(method="gather" if last else "ring"),
        "layout size": lambda: _small(layout=distributed.contiguous(8, size + 1)),
        "mesh": lambda: _small(mesh=mesh_of(FACTORS[size])),
        "mesh kind": lambda: _small(mesh=3),
        "mask": lambda: _small(attn_mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)),
        "mask gradient": lambda: _small(attn_mask=torch.zeros(2, 1, requires_grad=last)),
        "meta": lambda: attend(*[torch.zeros(1, 1, 2, 4, device="meta")] * 3),
        "sums": lambda: _small_dtensor(sinks=_placed(Partial())),
        "one DTensor": lambda: _small(logit_scale=_placed(Replicate())),
        "mask of DTensors": lambda: _small_dtensor(attn_mask=_placed(Replicate())),
        "placement of sinks": lambda: _small_dtensor(
            sinks=distribute_tensor(
                torch.zeros(2), mesh_of((size,)), [Shard(0) if last else Replicate()], src_data_rank=None
            )
        ),
        "head dim": lambda: attend(*[_dtensor(Shard(2), Shard(3))] * 3),
        "heads": lambda: attend(*[_dtensor(Shard(1))] * 3),
        "heads on one": lambda: attend(*[_dtensor(Shard(1 if last else 2))] * 3),
        "parts of sums": lambda: attend(*[_dtensor(Shard(2), Partial())] * 3),
        "starts": lambda: _packed([0, 2.5] if last else [0, 2]),
        "starts kind": lambda: _packed(None if last else [0, 2]),
        "starts fall": lambda: _packed([0, 3, 2]),
        "starts of keys": lambda: _packed([0, 1, 2], [0, 2]),
        "starts end": lambda: _packed(torch.tensor([0, 2 * size + 1]), layout="contiguous"),
        "query alone": lambda: _of_placements(Shard(2), None, Shard(2)),
        "key alone": lambda: _of_placements(None, Shard(2), None),
        "placements": lambda: _of_placements(Shard(2), Shard(2), Replicate()),
        "whole rows": lambda: _of_placements(*[Replicate()] * 3),
        "other mesh": lambda: _small_dtensor(sinks=_elsewhere()),
        "one mask row": lambda: _small(attn_mask=torch.zeros(1 if last else 2, 2 * size)),
        "method name": lambda: _small(method="star" if last else "ring"),
        "hybrid": lambda: _small(method="hybrid" if last else "ring"),
        "dimensions": lambda: _small(mesh=mesh_of(FACTORS[size]), method="ring" if last else "hybrid"),
        "layout": lambda: _small(layout=3),
        "layout name": lambda: _small(layout="spiral"),
        "steps": lambda: _small(is_causal=True, layout=_in_steps(2), key_layout=_in_steps(3), length=6),
        "blocks": lambda: _small(block_mask=_blocks(2 * size) if last else None),
        "other blocks": lambda: _small(
            block_mask=_blocks(2 * size, **({"tiles": lambda x: ~x} if last else {}))
        ),
        "blocks of fewer": lambda: _small(block_mask=_blocks(2)),
        "blocks on one": lambda: _small(block_mask=_blocks(2 * size + 2 * last)),
        "blocks of a rank": lambda: _small(
            block_mask=_blocks(2 * size, length_k=lambda n: None, counts=lambda x: x[:, :, :1])
        ),
        "blocks beyond": lambda: _small(
            block_mask=_blocks(2 * size, indices=lambda x: x + size), method="ulysses"
        ),
        "blocks of lists": lambda: _small(
            block_mask=_blocks(2 * size, counts=lambda x: x.tolist() if last else x)
        ),
        "meta blocks": lambda: _small(block_mask=_blocks(2 * size).to("meta")),
        "kind of blocks": lambda: _small(block_mask=3 if last else _blocks(2 * size)),
        "heads of blocks": lambda: _small(block_mask=_blocks(2 * size, counts=lambda x: x.expand(1, 3, -1))),
        "whole": lambda: distributed.shard(torch.zeros(9), distributed.contiguous(8, size), 0, 0),
        "local": lambda: distributed.unshard(torch.zeros(3), distributed.contiguous(2 * size, size), 0),
        "cut": lambda: distributed.unshard(torch.zeros(2), distributed.contiguous(8, size + 1), 0),
    }
    text = _error_of(calls[name])
    dist.barrier()  # all are still in step
    return text


def _rows(*, dtype: torch.dtype = torch.float32, hq: int = 2, hk: int = 2, d: int = 4) -> list[Tensor]:
    return [torch.zeros(1, heads, 4, d).to(dtype) for heads in (hq, hk, hk)]


def _wrong_arguments() -> list[tuple[list[Any], dict[str, Any]]]:
    """What `tilewise.attention` refuses: rows and options."""
    nan, inf, two = float("nan"), float("inf"), torch.ones(2)
    f16, f64 = torch.float16, torch.float64
    row = _rows()[0]
    options: dict[str, list[Any]] = {
        "attn_mask": [torch.zeros(4, 1, dtype=x) for x in (torch.int32, f16, f64)]
        + [torch.zeros(1, 1, 1, 4, 1), torch.zeros(3, 1), [True], row.to_sparse()],
        "dropout_p": [1.5, -0.1, nan, "a"],
        "is_causal": ["no", 2],
        "scale": [nan, inf, "a"],
        "alignment": ["left", 3],
        "window": [(-1, 2), (1.5, None), 3, (1, 2, 3), "ab"],
        "softcap": [-1.0, nan, inf, "3"],
        "alibi_slopes": [two.half(), two.double(), torch.ones(2, 2), torch.ones(2, requires_grad=True)],
        "sinks": [two.half(), two.double(), two.int(), torch.ones(3), torch.ones(1, 2), [1.0, 2.0]],
        "logit_scale": [two.bfloat16(), torch.ones(3), torch.ones(1, 2), 1.0],
        "kernel": ["quick", 3],
        "deterministic": ["yes"],
        "precision": ["high", True],
        "return_lse": ["yes"],
        "block_mask": [3, "causal", torch.ones(4, 4), tilewise.BlockMask],
    }
    found: list[tuple[list[Any], dict[str, Any]]] = [
        (_rows(), {name: x}) for name, values in options.items() for x in values
    ]
    found += [(_rows(dtype=x), {}) for x in (torch.int32, torch.complex64, torch.float8_e4m3fn)]
    found += [(_rows(hq=4), {}), (_rows(hq=4), dict(enable_gqa=3)), (_rows(hq=3), dict(enable_gqa=True))]
    found += [(_rows(dtype=f16), dict(sinks=two.half())), (_rows(d=0), {}), ([None, row, row], {})]
    found += [([row.half(), row, row], {}), ([row, row[..., :2], row], {}), ([row, row, row[:, :, :3]], {})]
    found += [([row.expand(2, -1, -1, -1), row, row], {}), ([row.to_sparse(), row, row], {})]
    return found


def wrong_arguments(method: str) -> list[str]:
    """Where ranks do not say what `tilewise.attention` does, of what all or only the last has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = FACTORS[size] if method == "hybrid" else (size,)
    attend = partial(distributed.attention, mesh=mesh_of(shape), method=method)
    wrong = []
    for n, (rows, options) in enumerate(_wrong_arguments()):
        alone = _error_of(lambda rows=rows, options=options: tilewise.attention(*rows, **options))
        together = _error_of(lambda rows=rows, options=options: attend(*rows, **options))
        if rank < size - 1:
            rows, options = _rows(), {}
        last = _error_of(lambda rows=rows, options=options: attend(*rows, **options))
        for found, expected in (
            (together, alone),
            (last, f"InvalidArgument: rank {size - 1} raised {alone}"),
        ):
            if found != expected or "nothing" in found:
                wrong.append(f"{n}: {found}, expected {expected}")
    return wrong


def outside() -> list[str]:
    """What the last rank, which a mesh and a group leave out, is told. The last call has a mesh of two."""
    size = dist.get_world_size()
    inside = list(range(size - 1))
    layout = distributed.contiguous(2 * (size - 1), size - 1)
    meshes = [DeviceMesh("cpu", inside), dist.new_group(inside)]
    texts = [_error_of(lambda mesh=mesh: _small(mesh=mesh)) for mesh in meshes]
    calls = (lambda mesh=mesh: distributed.unshard(torch.zeros(2), layout, 0, mesh) for mesh in meshes)
    texts += [_error_of(call) for call in calls]
    two = mesh_of(FACTORS[size])
    return [*texts, _error_of(lambda: distributed.unshard(torch.zeros(2), layout, 0, two))]


def broken_rank(name: str) -> str:
    """Of a rank that never calls, or whose kernel fails, the others hear after the time-out."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    rows = [torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
    first = dist.get_rank() == 0
    if first and name == "silent":
        return "did not call"

    def fails(*_: Any, **__: Any) -> Any:
        raise tilewise.DeviceError("a kernel failed")

    def call() -> None:
        with patch.object(pieces, name, fails) if first else nullcontext():
            distributed.attention(*rows, mesh=group).sum().backward()

    return _error_of(call)


# Other ways to call


def alone_like_attention() -> bool:
    """In a group of one, bit for bit."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 20, 8, dtype=torch.bfloat16) for _ in range(3))
    mine = groups[dist.get_rank()]
    same = True
    for method in ("gather", "ulysses"):
        found = distributed.attention(q, k, v, is_causal=True, mesh=mine, method=method)
        same = same and torch.equal(found, tilewise.attention(q, k, v, is_causal=True))
    return same


def of_dtensors(method: str) -> bool:
    """DTensors along the sequence in and out, with their gradients."""
    size = dist.get_world_size()
    mesh = mesh_of((size,))
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 5 * size + 1, 8, dtype=torch.float64) for _ in range(3)]
    given = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in whole]
    out = distributed.attention(*given, is_causal=True, method=method)
    leaves = [x.requires_grad_() for x in whole]
    expected = tilewise.attention(*leaves, is_causal=True)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    out.backward(distribute_tensor(cotangent, mesh, [Shard(2)]))
    expected.backward(cotangent)
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(given, leaves, strict=True))]
    return all(torch.allclose(a.full_tensor(), b, rtol=0, atol=1e-12) for a, b in pairs)


PER_HEAD = {"sinks": True, "logit_scale": True, "alibi_slopes": False}  # whether it has a gradient


def per_head_dtensors(method: str, by_heads: bool, sharded: bool) -> list[str]:
    """What differs from one process where what heads have is a DTensor, replicated or sharded.

    With `by_heads` the mesh has a second dimension, over which heads are split.
    """
    size = dist.get_world_size()
    mesh = mesh_of(FACTORS[size] if by_heads else (size,))
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 6 * size, 8, dtype=torch.float64) for _ in range(3)]
    extra = {name: torch.rand(4, dtype=torch.float64) for name in PER_HEAD}
    placed = [Shard(2), Shard(1)][: mesh.ndim]
    given = [distribute_tensor(x, mesh, placed).requires_grad_() for x in whole]
    of_heads = [Shard(0) if sharded else Replicate()] * mesh.ndim
    heads = {
        name: distribute_tensor(x, mesh, of_heads).requires_grad_(PER_HEAD[name]) for name, x in extra.items()
    }
    out = distributed.attention(*given, is_causal=True, method=method, **heads)
    leaves = [x.requires_grad_() for x in whole]
    alone = {name: x.requires_grad_(PER_HEAD[name]) for name, x in extra.items()}
    expected = tilewise.attention(*leaves, is_causal=True, **alone)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    out.backward(distribute_tensor(cotangent, mesh, placed))
    expected.backward(cotangent)
    pairs = {"out": (out, expected), "query": (given[0].grad, leaves[0].grad)}
    pairs |= {name: (heads[name].grad, alone[name].grad) for name in PER_HEAD if PER_HEAD[name]}
    wrong = [
        name for name, (a, b) in pairs.items() if not torch.allclose(a.full_tensor(), b, rtol=0, atol=1e-12)
    ]
    return wrong + [f"placement of {name}" for name in heads if name in pairs
                    and heads[name].grad.placements != heads[name].placements]  # fmt: skip


def torch_context_parallel(balanced: bool, compiled: bool) -> bool:
    """torch's own context_parallel with Tilewise around it, which gives what one process gives."""
    size = dist.get_world_size()
    mesh = mesh_of((size,))
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 6 * size, 8) for heads in (4, 2, 2)]
    cotangent = torch.randn(2, 4, 6 * size, 8)
    parts = [x.clone() for x in (*whole, cotangent)]

    def attend(*rows: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    call = torch.compile(attend, backend="aot_eager") if compiled else attend
    with patch.object(_cp_options, "enable_load_balance", balanced), sdpa.use():
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
            leaves = [x.detach().clone().requires_grad_() for x in parts[:3]]
            out = call(*leaves)
            out.backward(parts[3])
        ours = [route for route in sdpa.calls() if route.startswith("tilewise")]
        own = [out.detach(), *(x.grad for x in leaves)]
        found = context_parallel_unshard(mesh, own, [2] * 4)
    leaves = [x.requires_grad_() for x in whole]
    expected = tilewise.attention(*leaves, is_causal=True, enable_gqa=True)
    expected.backward(cotangent)
    pairs = zip(found, (expected, *(x.grad for x in leaves)), strict=True)
    return len(ours) == 1 and all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in pairs)


def use_inside_context_parallel() -> str:
    """Refused; afterwards torch has its function again, and Tilewise is off."""
    mesh, x = mesh_of((dist.get_world_size(),)), torch.zeros(1, 1, 2 * dist.get_world_size(), 4)
    before = F.scaled_dot_product_attention

    def call() -> None:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]), sdpa.use():
            pass

    text = _error_of(call)
    assert F.scaled_dot_product_attention is before and not sdpa.is_enabled()
    return text


def entries_over_a_mesh() -> bool:
    """Slopes [B, Hq] where one dimension of the mesh splits the sequence and the other the batch."""
    size = dist.get_world_size()
    mesh = mesh_of(FACTORS[size])
    torch.manual_seed(0)
    whole = [torch.randn(4, 2, 6 * size, 8, dtype=torch.float64) for _ in range(3)]
    slopes = torch.rand(4, 2, dtype=torch.float64)
    given = [distribute_tensor(x, mesh, [Shard(2), Shard(0)]) for x in whole]
    placed = distribute_tensor(slopes, mesh, [Replicate(), Replicate()])
    out = distributed.attention(*given, is_causal=True, alibi_slopes=placed)
    expected = tilewise.attention(*whole, is_causal=True, alibi_slopes=slopes)
    return torch.allclose(out.full_tensor(), expected, rtol=0, atol=1e-12)


def starts_in_a_tensor() -> bool:
    """The same bits as of a list."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(6 * size, 2, 8)
    starts = [0, 5, 6 * size]
    local = distributed.shard(x, distributed.documents(torch.tensor(starts), size), rank, 0)
    outs = [
        distributed.attention_varlen(local, local, local, given, is_causal=True)
        for given in (starts, torch.tensor(starts, dtype=torch.int32))
    ]
    return torch.equal(*outs)


def without_validation() -> bool:
    """Ranks with as many tokens each need no message before the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4 * size, 8, dtype=torch.float64)
    layout = distributed.zigzag(4 * size, size)
    local = distributed.shard(x, layout, rank, 2)
    out = distributed.attention(local, local, local, is_causal=True, layout="zigzag", validate=False)
    expected = distributed.shard(tilewise.attention(x, x, x, is_causal=True), layout, rank, 2)
    return torch.allclose(out, expected, rtol=0, atol=1e-12)


def partial_losses(method: str) -> bool:
    """The last rank's loss is of lse alone, those of the others of out. The mask is one number for all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = mesh_of(FACTORS[size] if method == "hybrid" else (size,))
    torch.manual_seed(0)
    leaves = [torch.randn(1, 4, 3 * size, 8, dtype=torch.float64) for _ in range(3)]
    layout = distributed.contiguous(3 * size, size)
    local = [distributed.shard(x, layout, rank, 2).requires_grad_() for x in leaves]
    mask = torch.ones((), dtype=torch.float64)
    out, lse = distributed.attention(*local, mask, mesh=mesh, method=method, return_lse=True)
    (lse if rank == size - 1 else out).square().sum().backward()
    whole = [x.requires_grad_() for x in leaves]
    out, lse = tilewise.attention(*whole, mask, return_lse=True)
    (out[:, :, :-3].square().sum() + lse[:, :, -3:].square().sum()).backward()
    pairs = zip(local, whole, strict=True)
    return all(
        torch.allclose(a.grad, distributed.shard(b.grad, layout, rank, 2), rtol=0, atol=1e-12)
        for a, b in pairs
    )


def blocks_of_dtensors() -> bool:
    """On a mesh over tokens and heads: a mask of the whole sequence, and of this rank's heads."""
    size = dist.get_world_size()
    mesh = mesh_of(FACTORS[size])
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 5 * size, 8, dtype=torch.float64) for _ in range(3)]
    dense = torch.rand(1, 4, 5 * size, 5 * size) < 0.4
    given = [distribute_tensor(x, mesh, [Shard(2), Shard(1)]).requires_grad_() for x in whole]
    own = dense.chunk(mesh.size(1), 1)[mesh.get_local_rank(1)]
    out = distributed.attention(*given, block_mask=tilewise.BlockMask.from_dense(own, 4))
    leaves = [x.requires_grad_() for x in whole]
    expected = tilewise.attention(*leaves, dense)
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    out.backward(distribute_tensor(cotangent, mesh, [Shard(2), Shard(1)]))
    expected.backward(cotangent)
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(given, leaves, strict=True))]
    return all(torch.allclose(a.full_tensor(), b, rtol=0, atol=1e-12) for a, b in pairs)


# Tensor parallelism


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _operators() -> dict[str, tuple[Any, list[Tensor], list[Placement]]]:
    """Operators on tensors and how these are placed."""
    q, k, v = _numbers(4, 8, 9, 8), _numbers(4, 4, 9, 8), _numbers(4, 4, 9, 8)
    tables = [x.double() for x in tilewise.rope_tables(9, 8)]
    whole, split = Replicate(), Shard(0)
    attend = partial(tilewise.attention, enable_gqa=True, is_causal=True, return_lse=True)
    biased = partial(tilewise.attention, enable_gqa=True)
    x, up, down, residual = _numbers(2, 4, 8), _numbers(16, 8), _numbers(8, 16), _numbers(2, 4, 8)

    def ffn(x: Tensor, up: Tensor, down: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return tilewise.ffn(x, up, down, down_bias=bias, residual=residual, keep_products=True)

    return {
        "entries": (attend, [q, k, v], [Shard(0)] * 3),
        "heads": (attend, [q, k, v], [Shard(1)] * 3),
        "mask": (biased, [q, k, v, _numbers(1, 1, 9, 9)], [Shard(1)] * 3 + [whole]),
        "mask of heads": (biased, [q, k, v, _numbers(8, 9, 1)], [Shard(1)] * 3 + [split]),
        "sinks": (
            lambda q, k, v, sinks: biased(q, k, v, sinks=sinks),
            [q, k, v, _numbers(8)],
            [Shard(0)] * 3 + [whole],
        ),
        "logit scale": (
            lambda q, k, v, logit_scale: biased(q, k, v, logit_scale=logit_scale),
            [q, k, v, _numbers(8)],
            [Shard(0)] * 3 + [whole],
        ),
        "logit scale of heads": (
            lambda q, k, v, logit_scale: biased(q, k, v, logit_scale=logit_scale),
            [q, k, v, _numbers(8)],
            [Shard(1)] * 3 + [split],
        ),
        "rope": (tilewise.apply_rope, [q, k, *tables], [Shard(1)] * 2 + [whole] * 2),
        "rms_norm": (tilewise.rms_norm, [_numbers(4, 6, 8), _numbers(8)], [split, whole]),
        "layer_norm": (
            lambda x, w, b, r: tilewise.layer_norm(x, w, b, residual=r),
            [_numbers(4, 6, 8), _numbers(8), _numbers(8), _numbers(4, 6, 8)],
            [split, whole, whole, split],
        ),
        "columns": (partial(tilewise.linear, activation="gelu"), [x, up], [whole, split]),
        "summands": (tilewise.linear, [_numbers(2, 4, 16), down], [Shard(2), Shard(1)]),
        "ffn": (ffn, [x, up, down, _numbers(8), residual], [whole, split, Shard(1), whole, whole]),
    }


def sharded_operator(name: str) -> list[str]:
    """What differs where an operator runs on DTensors."""
    torch.manual_seed(0)
    mesh = mesh_of((dist.get_world_size(),))
    function, tensors, placements = _operators()[name]
    tables = 2 if name == "rope" else 0  # which have no gradient
    whole = [x.requires_grad_(n < len(tensors) - tables) for n, x in enumerate(tensors)]
    ours = [
        distribute_tensor(x.detach(), mesh, [placed]).requires_grad_(x.requires_grad)
        for x, placed in zip(tensors, placements, strict=True)
    ]
    results = [function(*x) for x in (whole, ours)]
    expected, found = ([x] if isinstance(x, Tensor) else list(x) for x in results)
    cotangents = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(expected, cotangents)
    torch.autograd.backward(found, [distribute_tensor(x, mesh, [Replicate()]) for x in cotangents])
    expected += [x.grad for x in whole if x.requires_grad]
    found += [x.grad for x in ours if x.requires_grad]
    pairs = enumerate(zip(found, expected, strict=True))
    return [
        f"{name} {n}" for n, (a, b) in pairs if not torch.allclose(a.full_tensor(), b, rtol=0, atol=1e-12)
    ]


def parallelized_attention() -> bool:
    """torch's parallelize_module over the heads of a layer."""
    torch.manual_seed(0)
    mesh = mesh_of((dist.get_world_size(),))
    alone = tilewise.nn.Attention(32, 8, 4, is_causal=True, sinks=False, dtype=torch.float64)
    layer = copy.deepcopy(alone)
    plan: dict[str, Any] = {
        x: ColwiseParallel(use_local_output=False) for x in ("q_proj", "k_proj", "v_proj")
    }
    parallelize_module(layer, mesh, plan | {"out_proj": RowwiseParallel()})
    x = _numbers(2, 7, 32)
    out, expected = layer(x), alone(x)
    cotangent = torch.randn_like(expected)
    out.backward(cotangent)
    expected.backward(cotangent)
    gradients = zip(layer.parameters(), alone.parameters(), strict=True)
    pairs = [(out, expected), *((a.grad.full_tensor(), b.grad) for a, b in gradients)]
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def _small_layer() -> tilewise.nn.TransformerLayer:
    sizes = dict(embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=4, ffn_dim=48, max_positions=64)
    return tilewise.nn.TransformerLayer("llama-2-7b", **sizes, dtype=torch.float64)


def _parallelized(layer: tilewise.nn.TransformerLayer, mesh: DeviceMesh) -> tilewise.nn.TransformerLayer:
    """Heads and hidden features over the mesh, a copy of everything else on every rank."""
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "ffn.gate_proj", "ffn.up_proj")
    rows = ("attention.out_proj", "ffn.down_proj")
    plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    return distribute_module(parallelize_module(layer, mesh, plan), mesh)


def parallelized_layer() -> list[str]:
    """What differs where torch's parallelize_module splits a whole layer, attention and gated network."""
    torch.manual_seed(0)
    mesh = mesh_of((dist.get_world_size(),))
    alone = _small_layer()
    layer = _parallelized(copy.deepcopy(alone), mesh)
    x = _numbers(2, 7, 32).requires_grad_()
    given = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
    out, expected = layer(given), alone(x)
    cotangent = torch.randn_like(expected)
    out.backward(distribute_tensor(cotangent, mesh, [Replicate()]))
    expected.backward(cotangent)
    with torch.no_grad():
        inferred = layer(given)
    pairs = {"out": (out, expected), "without a gradient": (inferred, expected), "x": (given.grad, x.grad)}
    others = zip(layer.named_parameters(), alone.parameters(), strict=True)
    pairs |= {name: (ours.grad, theirs.grad) for (name, ours), theirs in others}
    wrong = [
        name for name, (a, b) in pairs.items() if not torch.allclose(a.full_tensor(), b, rtol=0, atol=1e-12)
    ]
    whole = dict(alone.named_parameters())
    split = [name for name, x in layer.named_parameters() if x.to_local().shape != whole[name].shape]
    return wrong if len(split) == 7 else [*wrong, f"only {split} are split"]


def parallelized_cache(paged: bool) -> list[str]:
    """What differs where such a layer keeps keys and values, of its own heads on every rank."""
    torch.manual_seed(0)
    mesh = mesh_of((dist.get_world_size(),))
    alone = _small_layer()
    layer = _parallelized(copy.deepcopy(alone), mesh)
    ours, theirs = (alone.make_cache(2, 16, 4 if paged else None) for _ in range(2))

    def placed(x: Tensor | None, placement: Placement) -> Any:
        return None if x is None else distribute_tensor(x, mesh, [placement])

    cache = tilewise.nn.KVCache(
        *(placed(ours.k, Shard(1)), placed(ours.v, Shard(1))),
        *(placed(ours.lengths, Replicate()), placed(ours.page_table, Replicate())),
    )
    wrong = []
    with torch.no_grad():
        for length in (7, 1, 3):
            x = _numbers(2, length, 32)
            out = layer(distribute_tensor(x, mesh, [Replicate()]), cache=cache).full_tensor()
            if not torch.allclose(out, alone(x, cache=theirs), rtol=0, atol=1e-12):
                wrong.append(f"out of {length}")
    for name in ("k", "v"):
        if not torch.allclose(getattr(cache, name).full_tensor(), getattr(theirs, name), rtol=0, atol=1e-12):
            wrong.append(name)
    return wrong


INTO_CACHE = {  # how rows and caches are placed, and what else there is
    "entries": (Shard(0), Shard(0), ("positions", "cache_starts")),
    "entries of one row": (Shard(0), Shard(0), ("cache_starts",)),
    "heads": (Shard(1), Shard(1), ("positions", "cache_starts")),
    "heads of pages": (Shard(1), Shard(1), ("cache_ends", "page_table")),
    "copies": (Replicate(), Replicate(), ("cache_ends",)),
    "rows split, caches whole": (Shard(1), Replicate(), ("cache_ends",)),
    "rows whole, caches split": (Replicate(), Shard(1), ("cache_ends",)),
}


def rope_into_shards(name: str) -> list[str]:
    """What differs where keys and values go into caches that are sharded."""
    torch.manual_seed(0)
    mesh = mesh_of((dist.get_world_size(),))
    of_rows, of_caches, extra = INTO_CACHE[name]
    rows = [_numbers(4, 8, 3, 8), _numbers(4, 4, 3, 8), _numbers(4, 4, 3, 8)]
    shape = (12, 4, 4, 8) if "page_table" in extra else (4, 4, 12, 8)
    caches = [torch.full(shape, 7.0, dtype=torch.float64) for _ in range(2)]
    starts = torch.tensor([0, 5, 2, 9], dtype=torch.int32)
    named = dict(
        positions=starts[:, None] + torch.arange(3, dtype=torch.int32),
        cache_starts=starts,
        cache_ends=starts + 3,
        page_table=torch.randperm(12).to(torch.int32).view(4, 3),
    )
    given = {key: named[key] for key in extra}
    tables = list(tilewise.rope_tables(20, 8))
    by_entries = Shard(0) if of_rows == Shard(0) else Replicate()
    ours = [distribute_tensor(x, mesh, [of_rows]) for x in rows]
    of_ours = [distribute_tensor(x, mesh, [of_caches]) for x in caches]
    angles = [distribute_tensor(x, mesh, [Replicate()]) for x in tables]
    more = {key: distribute_tensor(x, mesh, [by_entries]) for key, x in given.items()}
    out = tilewise.rope_into_cache(*ours, *of_ours, *angles, **more)
    expected = tilewise.rope_into_cache(*rows, *caches, *tables, **given)
    pairs = {"out": (out, expected), "k": (of_ours[0], caches[0]), "v": (of_ours[1], caches[1])}
    return [key for key, (a, b) in pairs.items() if not torch.equal(a.full_tensor(), b)]


def rope_into_wrong_shards(paged: bool) -> str:
    """The error for caches that are sharded along their positions, or over the pages of all entries."""
    mesh = mesh_of((dist.get_world_size(),))
    placed, table = (
        ([Shard(0)], torch.arange(12, dtype=torch.int32).view(4, 3)) if paged else ([Shard(2)], None)
    )
    rows = [distribute_tensor(torch.zeros(4, 4, 3, 8), mesh, [Shard(0)]) for _ in range(3)]
    shape = (12, 4, 4, 8) if paged else (4, 4, 12, 8)
    caches = [distribute_tensor(torch.zeros(shape), mesh, placed) for _ in range(2)]
    tables = [distribute_tensor(x, mesh, [Replicate()]) for x in tilewise.rope_tables(12, 8)]
    more = {} if table is None else {"page_table": distribute_tensor(table, mesh, [Shard(0)])}
    try:
        tilewise.rope_into_cache(*rows, *caches, *tables, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Models


def _small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).double()


def hugging_face_decoder(method: str, compiled: bool) -> bool:
    """Logits and gradients of a decoder over the ranks, against one process.

    transformers computes norms and angles in f32 whatever the model's type is.
    """
    from tilewise.integrations.transformers import context_parallel

    rank, size = dist.get_rank(), dist.get_world_size()
    layout = distributed.zigzag(4 * size + 3, size)
    tokens = torch.randint(50, (2, layout.length), generator=torch.Generator().manual_seed(1))
    alone, model = _small_llama(), _small_llama()
    context_parallel(model, mesh_of((size,)), method=method, layout=layout)
    positions = layout.positions(rank).unsqueeze(0)
    call = torch.compile(model, backend="eager") if compiled else model
    local = call(input_ids=distributed.shard(tokens, layout, rank, 1), position_ids=positions).logits
    expected = alone(input_ids=tokens).logits
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    local.backward(distributed.shard(cotangent, layout, rank, 1))
    expected.backward(cotangent)
    near = [torch.allclose(local, distributed.shard(expected, layout, rank, 1), rtol=0, atol=1e-5)]
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        near.append(torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-5))
    return all(near)


def wrong_decoders() -> dict[str, str]:
    """What a decoder over the ranks says where its results would be wrong, on this rank."""
    from tilewise.integrations.transformers import context_parallel

    rank, size = dist.get_rank(), dist.get_world_size()
    layout = distributed.zigzag(4 * size, size)
    model = _small_llama().eval()
    context_parallel(model, mesh_of((size,)))
    tokens = torch.ones(1, 4, dtype=torch.int64)
    positions = layout.positions(rank)[None]
    given = dict(input_ids=tokens, position_ids=positions)
    own_mask = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    calls = {
        "positions": lambda: model(tokens),
        "labels": lambda: model(**given, labels=tokens),
        "cache": lambda: model.generate(**given, max_new_tokens=2, pad_token_id=0),
        "padding": lambda: model(**given, attention_mask=torch.tensor([[0, 1, 1, 1]])),
        "mask": lambda: model(**given, attention_mask=own_mask),
        "shifted": lambda: model(**given, labels=tokens, shift_labels=tokens),
        "by place": lambda: model(tokens, None, positions),
    }
    found = {name: _error_of(call) for name, call in calls.items()}
    model.set_attn_implementation("eager")
    found["elsewhere"] = _error_of(lambda: model(tokens, labels=tokens))
    return {name: text.partition(": expected")[0].partition(" is")[0] for name, text in found.items()}


def example_losses(method: str) -> tuple[list[float], list[float]]:
    """Losses of the example's training on all ranks, and on this one alone."""
    example = load("examples/context_parallel/train.py")
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = DeviceMesh.from_group(groups[dist.get_rank()], "cpu")
    settings = dict(steps=4, length=64, batch=2, method=method)
    return example.train(mesh_of((dist.get_world_size(),)), **settings), example.train(alone, **settings)
