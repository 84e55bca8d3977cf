"""How the operators may be sharded: what DTensor asks before it runs one of them on local tensors.

With these, torch's `parallelize_module` splits Tilewise's layers over heads and features, and batches are
split anywhere. A gradient of what ranks share is Partial: DTensor sums it where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from tilewise._binding import (
    BACKWARD_OWN,
    DIFFERENTIABLE,
    INDEX,
    attention_backward,
    attention_forward,
    complete,
)
from tilewise._errors import reject

# Acceptable placements: those of the results, and those of the arguments, None for what is no tensor.
Placements = list[Placement | None]
Strategy = tuple[Placements, Placements]
_ops = torch.ops.tilewise


def register_sharding(
    operator: torch._ops.OpOverload, written: Sequence[int] = (), rows: int | None = None
) -> Callable[[Callable[..., list[Strategy]]], None]:
    """torch's function of that name, but for operators that give a list of tensors, too.

    torch's takes the number of results from the schema, where a list is one.

    Args:
        operator: the operator.
        written: arguments that it writes to. They stay as they are placed: what is written to a redistributed
            copy would be lost.
        rows: the argument whose rows are split only where they are already. DTensor would rather scatter a
            sum over its rows than copy it to all ranks. But rows [B·S, E] of a rank that are no whole
            sequences cannot be viewed as [B, S, E] again.
    """

    def register(strategies: Callable[..., list[Strategy]]) -> None:
        def strategy(schema: OpSchema) -> OpStrategy:
            specs = (
                x.strategies[0].output_spec if isinstance(x, OpStrategy) else x for x in schema.args_schema
            )
            found = strategies(*specs)
            expanded = expand_to_full_mesh_op_strategy(
                schema.get_mesh_from_args(),
                schema,
                [results + arguments for results, arguments in found],
                input_index=len(found[0][0]),
            )
            if rows is not None:
                expanded = _splitting_no_rows(schema, expanded, rows)
            return _writing_in_place(operator, schema, expanded, written) if written else expanded

        # All that is no tensor counts for what a cached strategy is good for.
        info = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(operator, strategy, info)

    return register


def _writing_in_place(
    operator: torch._ops.OpOverload, schema: OpSchema, found: OpStrategy, written: Sequence[int]
) -> OpStrategy:
    """The strategies that leave the arguments it writes to where they are. These come after tensors alone."""
    placed = {n: schema.args_strategy[n].strategies[0].output_spec.placements for n in written}
    kept = [x for x in found.strategies if all(x.input_spec(n).placements == placed[n] for n in written)]
    if not kept:
        names = [operator._schema.arguments[n].name for n in written]
        reject(
            names[0],
            f"{' and '.join(names)} replicated or sharded alike, by heads or, without pages, by entries, in "
            "equal parts",
            [list(of) for of in placed.values()],
        )
    return OpStrategy(kept)


def _splitting_no_rows(schema: OpSchema, found: OpStrategy, rows: int) -> OpStrategy:
    """The strategies that shard dimension 0 of an argument only where it is sharded."""
    n = sum(isinstance(x, OpStrategy) for x in schema.args_schema[:rows])  # strategies know tensors alone
    given = schema.args_strategy[n].strategies[0].output_spec.placements

    def splits(asked: Sequence[Placement]) -> bool:
        return any(a == Shard(0) != b for a, b in zip(asked, given, strict=True))

    return OpStrategy([x for x in found.strategies if not splits(x.input_spec(n).placements)])


def _given(argument: Any) -> bool:
    """Specs stand in place of tensors."""
    return hasattr(argument, "placements")


def _placed(arguments: Sequence[Any], placement: Placement) -> list[Placement | None]:
    return [placement if _given(x) else None for x in arguments]


def _replicated(results: int, arguments: Sequence[Any]) -> Strategy:
    return [Replicate()] * results, _placed(arguments, Replicate())


def _divides(mesh: Any, *extents: int) -> bool:
    """Whether every part of a mesh gets as many; else heads of queries and keys would part ways."""
    return all(extent % mesh.size() == 0 for extent in extents)


def _mask_shard(mask: Any, dim: int) -> Placement:
    """A mask's part beside entries (dim 0) or heads (dim 1) of [B, H, Sq, Sk]."""
    own = dim - (4 - len(mask.shape))
    return Shard(own) if own >= 0 and mask.shape[own] != 1 else Replicate()


def _attention_inputs(arguments: Sequence[Any], dim: int) -> list[Placement | None] | None:
    """Of a shard of entries (0) or of heads (1); None where there is none."""
    query, key = arguments[0], arguments[1]
    packed = _given(arguments[INDEX["cumulative_q"]])
    if _given(arguments[INDEX["dropout_seed"]]) or arguments[INDEX["dropout_p"]] > 0:
        return None  # masks are drawn by the numbers of entries and heads in the whole
    if _given(arguments[INDEX["block_counts"]]):
        return None
    if dim == 0 and (packed or _given(arguments[INDEX["page_table"]])):
        return None  # a table has numbers of pages in the whole
    if not _divides(query.mesh, query.shape[dim], key.shape[dim]):
        return None
    placed = _placed(arguments, Replicate())
    placed[:3] = [Shard(dim)] * 3
    mask, slopes = arguments[INDEX["attn_mask"]], arguments[INDEX["alibi_slopes"]]
    if _given(mask):
        placed[INDEX["attn_mask"]] = _mask_shard(mask, dim)
    for name in ("sinks", "logit_scale"):
        if _given(arguments[INDEX[name]]) and dim == 1:
            placed[INDEX[name]] = Shard(0)
    if _given(slopes) and (dim == 1 or len(slopes.shape) == 2):
        placed[INDEX["alibi_slopes"]] = Shard(len(slopes.shape) - 1 if dim == 1 else 0)
    if _given(arguments[INDEX["key_lengths"]]) and dim == 0:
        placed[INDEX["key_lengths"]] = Shard(0)
    return placed


def _lse(arguments: Sequence[Any], dim: int) -> Placement:
    return Shard(0 if _given(arguments[INDEX["cumulative_q"]]) else dim)  # packed: [Hq, total]


@register_sharding(attention_forward)
def _(*given: Any) -> list[Strategy]:
    arguments = complete(given)
    found = [_replicated(2, given)]
    for dim in (0, 1):
        placed = _attention_inputs(arguments, dim)
        if placed is not None:
            found.append(([Shard(dim), _lse(arguments, dim)], placed[: len(given)]))
    return found


@register_sharding(attention_backward)
def _(*given: Any) -> list[Strategy]:
    own, rest = given[:BACKWARD_OWN], given[BACKWARD_OWN:]
    arguments, needed = complete(rest), own[-1]
    asked = [index for index, need in zip(DIFFERENTIABLE, needed, strict=False) if need]
    found = [_replicated(len(asked), given)]
    for dim in (0, 1):
        placed = _attention_inputs(arguments, dim)
        if placed is None:
            continue
        of_own = _placed(own, Shard(dim))
        for n in (1, 3):  # grad_lse and lse
            of_own[n] = _lse(arguments, dim) if _given(own[n]) else None
        # Ranks that share a mask, sinks or logit_scale have a part of their gradient each.
        results = [Partial() if isinstance(placed[index], Replicate) else placed[index] for index in asked]
        found.append((results, of_own + placed[: len(rest)]))
    return found


@register_sharding(_ops.norm_forward.default, rows=0)
def _(*given: Any) -> list[Strategy]:
    _x, residual, _weight, _bias, _epsilon, layer = given[:6]
    rows = _placed(given, Replicate())
    rows[0] = Shard(0)
    if _given(residual):
        rows[1] = Shard(0)
    results: Placements = [
        Shard(0),
        Shard(0) if _given(residual) else Replicate(),
        Shard(0),
        Shard(0) if layer else Replicate(),
    ]
    return [_replicated(4, given), (results, rows)]


@register_sharding(_ops.norm_backward.default, rows=2)
def _(*given: Any) -> list[Strategy]:
    _grad_y, _grad_sum, _x, _weight, _bias, _rstd, mean, needed = given[:8]
    rows = _placed(given, Shard(0))
    for n in (3, 4):
        rows[n] = Replicate() if _given(given[n]) else None
    if mean.shape[0] == 0:
        rows[6] = Replicate()
    results: Placements = [
        part for part, need in zip([Shard(0), Partial(), Partial()], needed, strict=True) if need
    ]
    return [_replicated(sum(needed), given), (results, rows)]


@register_sharding(_ops.gemm.default, rows=0)
def _(*given: Any) -> list[Strategy]:
    names = ("a", "b", "bias", "gate", "gate_bias", "residual")
    tensors = dict(zip_longest(names, given[:6]))

    def placed(**placements: Placement) -> list[Placement | None]:
        found = [placements.get(name, Replicate()) if _given(tensors[name]) else None for name in names]
        return found[: len(given)] + [None] * (len(given) - len(names))

    outputs = dict(b=Shard(0), bias=Shard(0), gate=Shard(0), gate_bias=Shard(0), residual=Shard(1))
    found: list[Strategy] = [
        _replicated(1, given),
        ([Shard(0)], placed(a=Shard(0), residual=Shard(0))),  # rows
        ([Shard(1)], placed(**outputs)),  # columns of the result
    ]
    activation = given[6] if len(given) > 6 else "none"
    if activation == "none" and not _given(tensors["gate"]):  # summands; what is added comes from one rank
        parts = dict(a=Shard(1), b=Shard(1), bias=Partial(), residual=Partial())
        found.append(([Partial()], placed(**parts)))
    return found


_FFN = ("x", "up", "down", "gate", "up_bias", "gate_bias", "down_bias", "residual")


def _ffn_placed(given: Sequence[Any], **placements: Placement) -> list[Placement | None]:
    tensors = dict(zip_longest(_FFN, given[: len(_FFN)]))
    found = [placements.get(name, Replicate()) if _given(tensors[name]) else None for name in _FFN]
    return found[: len(given)] + [None] * (len(given) - len(_FFN))


def _ffn_splits(backward: bool = False) -> list[tuple[str, dict[str, Placement]]]:
    """By tokens, and by hidden features: then what is added to the sum comes from one rank."""
    hidden: dict[str, Placement] = {name: Shard(0) for name in ("up", "gate", "up_bias", "gate_bias")}
    hidden["down"] = Shard(1)
    if not backward:
        hidden |= dict(down_bias=Partial(), residual=Partial())
    return [("tokens", dict(x=Shard(0), residual=Shard(0))), ("hidden", hidden)]


@register_sharding(_ops.ffn_forward.default, rows=0)
def _(*given: Any) -> list[Strategy]:
    found = [_replicated(1, given)]
    for kind, placements in _ffn_splits():
        found.append(([Shard(0) if kind == "tokens" else Partial()], _ffn_placed(given, **placements)))
    return found


@register_sharding(_ops.ffn_forward_kept.default, rows=0)
def _(*given: Any) -> list[Strategy]:
    gated = len(given) > 3 and _given(given[3])
    found = [_replicated(3, given)]
    for kind, placements in _ffn_splits():
        product = Shard(0 if kind == "tokens" else 1)
        out = Shard(0) if kind == "tokens" else Partial()
        found.append(([out, product, product if gated else Replicate()], _ffn_placed(given, **placements)))
    return found


@register_sharding(_ops.ffn_backward.default, rows=4)
def _(*given: Any) -> list[Strategy]:
    own, rest = given[:4], given[4:]
    asked = [name for name, need in zip(_FFN, own[1], strict=False) if need]
    found = [_replicated(len(asked), given)]
    for kind, placements in _ffn_splits(backward=True):
        if kind == "tokens":
            results: Placements = [Shard(0) if name == "x" else Partial() for name in asked]
            of_own = [Shard(0), None, *_placed(own[2:], Shard(0))]
        else:
            results = [Partial() if name == "x" else placements.get(name, Replicate()) for name in asked]
            of_own = [Replicate(), None, *_placed(own[2:], Shard(1))]
        found.append((results, of_own + _ffn_placed(rest, **placements)))
    return found


def _place_angles(placed: list[Placement | None], given: Sequence[Any], first: int) -> None:
    """Shards cos, sin and positions, from argument `first` on, by entries where each has its own."""
    for n in range(first, min(first + 3, len(given))):
        x = given[n]
        if _given(x) and len(x.shape) == (2 if n == first + 2 else 3) and x.shape[0] != 1:
            placed[n] = Shard(0)


@register_sharding(_ops.rope.default)
def _(*given: Any) -> list[Strategy]:
    query, key = given[0], given[1]
    results = 1 + _given(key)
    found = [_replicated(results, given)]
    for dim in (0, 1):
        placed = _placed(given, Replicate())
        placed[0] = Shard(dim)
        if _given(key):
            placed[1] = Shard(dim)
        if dim == 0:
            _place_angles(placed, given, 2)
        if _divides(query.mesh, query.shape[dim], *([key.shape[dim]] if _given(key) else [])):
            found.append(([Shard(dim)] * results, placed))
    return found


_INTO_CACHE = [argument.name for argument in _ops.rope_into_cache.default._schema.arguments]


@register_sharding(
    _ops.rope_into_cache.default, written=[_INTO_CACHE.index(x) for x in ("k_cache", "v_cache")]
)
def _(*given: Any) -> list[Strategy]:
    query, key = given[:2]
    tensors = dict(zip_longest(_INTO_CACHE, given))
    found = [_replicated(1, given)]
    for dim in (0, 1):
        if dim == 0 and _given(tensors["page_table"]):
            continue  # it has numbers of pages in the whole
        if not _divides(query.mesh, query.shape[dim], key.shape[dim]):
            continue
        placed = _placed(given, Replicate())
        placed[:5] = [Shard(dim)] * 5  # query, key, value and both caches
        if dim == 0:
            _place_angles(placed, given, _INTO_CACHE.index("cos"))
            for name in ("cache_starts", "cache_ends"):
                if _given(tensors[name]):
                    placed[_INTO_CACHE.index(name)] = Shard(0)
        found.append(([Shard(dim)], placed))
    return found
