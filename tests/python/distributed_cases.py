"""Random problems for several ranks, and what one process makes of them. Runs in every worker process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import tilewise
import torch
import torch.distributed as dist
from conftest import gradients
from contract import Tensors, assert_twice, moved
from test_properties import scaled_like_torch
from tilewise import distributed, reference
from tilewise.distributed import Layout, Span
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shapes = [list(x.shape) for x in self.rows]
        return (
            f"seed {self.seed} on {self.size} ranks: {self.dtype} {self.method} {shapes} {self.options} "
            f"{[*self.extra, *self.fixed]} {self.starts} {self.layout.ranks}"
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
            extra["attn_mask"] = numbers(*of_mask, kind=rng.choice([dtype, statistics]))
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
    return Case(seed, size, dtype, method, layout, key_layout, rows, extra, fixed, options, starts)


def attend_whole(case: Case, attend: Any, rows: list[Tensor], extra: dict[str, Tensor], **more: Any) -> Any:
    """One process's (out, lse), by attention or by a function of the reference."""
    options = {**case.options, **case.fixed, **extra, **more}
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
        return distributed.attention(*rows, mask, enable_gqa=True, **common)
    return distributed.attention_varlen(*rows, *case.starts, **common)


def _sharded(case: Case, name: str, x: Tensor, rank: int) -> Tensor:
    """A rank's part of what the whole was given, or of a gradient of it."""
    if name in ("sinks", "alibi_slopes") or (name == "attn_mask" and x.shape[-2] == 1):
        return x
    layout = case.key_layout if name in ("key", "value") else case.layout
    along = 2 if name == "attn_mask" or case.starts is None else 0
    if name == "lse":
        along = -1
    return distributed.shard(x, layout, rank, along)


def _unsharded(case: Case, name: str, x: Tensor) -> Tensor:
    if name == "sinks" or (name == "attn_mask" and x.shape[-2] == 1):
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


def check_exact(seed: int, size: int) -> str | None:
    """In float64 the ranks' results are those of one process. Gives what is wrong, if anything."""
    case = draw_case(seed, size, torch.float64)
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


def check_contract(seed: int, size: int, dtype: torch.dtype) -> str | None:
    """In other types they are as near to the truth as the contract asks of one process."""
    case = draw_case(seed, size, dtype)
    rank = dist.get_rank()
    actual = run_ranks(case, rank)
    if rank != 0:
        return None
    theirs = reference.attention if case.starts is None else reference.attention_varlen

    def draw(n: int) -> tuple[Tensors, Tensors]:
        values = [moved(x, n) if n else x for x in (*case.rows, *case.extra.values())]
        exact = run_whole(case, theirs, values, torch.float64, dtype=torch.float64)
        return exact, run_whole(case, scaled_like_torch(theirs), values, torch.float32, dtype=torch.float32)

    try:
        assert_twice(actual, draw)
    except AssertionError as error:
        return f"{case}: {error}"
    return None
