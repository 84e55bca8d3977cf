"""Calls on tensors without data, which tracing makes: the library's own checks, and the shapes of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise import _triton
from tilewise._binding import (
    BACKWARD_OWN,
    DIFFERENTIABLE,
    INDEX,
    complete,
)
from tilewise._errors import Unsupported, reject

_check_attention = torch.ops.tilewise.check_attention.default
_check_gemm = torch.ops.tilewise.check_gemm.default
_check_ffn = torch.ops.tilewise.check_ffn.default
_check_norm = torch.ops.tilewise.check_norm.default
_check_rope = torch.ops.tilewise.check_rope.default
_check_rope_into_cache = torch.ops.tilewise.check_rope_into_cache.default

# Checks


class _UnknownSize(Exception):
    """A size depends on data."""


def _known(size: Any) -> int:
    """A size as it is in this call; a symbol gives no guard away."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise _UnknownSize
    return int(hint)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return _known(value)
    if not isinstance(value, Tensor):
        return value
    shape, strides = ([_known(n) for n in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


def _check(operator: torch._ops.OpOverload, arguments: Sequence[Any]) -> None:
    """Raises what the call itself would, unless that depends on data or on sizes that do."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # slow to load, so only to trace

    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    seed = given.pop("dropout_seed", None)
    device = arguments[0].device
    for name, value in given.items():
        if isinstance(value, Tensor) and value.device != device:
            reject(name, f"memory on {device}", value.device)
    with unset_fake_temporarily():
        try:
            given = {name: _on_meta(value) for name, value in given.items()}
        except _UnknownSize:
            return
        if seed is not None:  # lies on any device, with nothing about it to be checked
            given["dropout_seed"] = torch.zeros(2, dtype=torch.int64, device="cpu")
        operator(**given)


def check_attention(arguments: Sequence[Any]) -> None:
    """The library's own checks of a call, whoever computes it."""
    given = list(arguments)
    given[INDEX["kernel_name"]] = None
    _check(_check_attention, given)


def _check_plain(query: Tensor, key: Tensor, value: Tensor, options: Tensor, mask: Tensor | None) -> None:
    if type(options) is not Tensor:  # without data itself
        return
    is_causal, enable_gqa, _, scaled, scale = options.tolist()
    given = (query, key, value, mask, 0.0, bool(is_causal), scale if scaled else None, bool(enable_gqa))
    _check(_check_attention, given)


# Shapes


def empty_beside(like: Tensor, last_extent: int) -> Tensor:
    """What the binding allocates."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to load, so only to trace

    return laid_out_beside(like, last_extent, like.dim() == 4 and guard_or_false(_heads_inside(like)))


def _heads_inside(like: Tensor) -> Any:
    return like.stride(1) < like.stride(2)


def laid_out_beside(like: Tensor, last_extent: int, heads_inside: bool | None = None) -> Tensor:
    """Empty, with heads outside positions in memory or inside, as in `like`."""
    if _heads_inside(like) if heads_inside is None else heads_inside:
        batch, heads, length = like.shape[:3]
        return like.new_empty((batch, length, heads, last_extent)).transpose(1, 2)
    return like.new_empty((*like.shape[:-1], last_extent))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty_outputs(query: Tensor, value: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    rows = (query.shape[1], query.shape[0]) if packed else query.shape[:-1]
    return empty_beside(query, value.shape[-1]), query.new_empty(rows, dtype=_statistics_dtype(query))


def _empty_gradients(tensors: Sequence[Any], needed: Sequence[bool]) -> list[Tensor]:
    """Gradients of attention's differentiable arguments, of which the last may be left out."""
    asked = [(index, x) for index, (x, need) in enumerate(zip(tensors, needed, strict=False)) if need]
    return [empty_beside(x, x.shape[-1]) if index < 3 else x.new_empty(x.shape) for index, x in asked]


def _empty_needed(tensors: Sequence[Any], needed: Sequence[bool]) -> list[Tensor]:
    asked = zip(tensors, needed, strict=False)
    return [x.new_empty(x.shape) for x, need in asked if need and x is not None]


# Attention


@torch.library.register_fake("tilewise::triton_forward")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    arguments = complete(arguments)
    check_attention(arguments)
    _triton.check(arguments)
    return _empty_outputs(arguments[0], arguments[2], packed=False)


@torch.library.register_fake("tilewise::attention_forward")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    arguments = complete(arguments)
    _check(_check_attention, arguments)
    return _empty_outputs(arguments[0], arguments[2], packed=arguments[INDEX["cumulative_q"]] is not None)


@torch.library.register_fake("tilewise::attention_inference")
@torch.library.register_fake("tilewise::attention_inference.masked")
def _(query: Tensor, key: Tensor, value: Tensor, options: Tensor, mask: Tensor | None = None) -> Tensor:
    _check_plain(query, key, value, options, mask)
    return empty_beside(query, value.shape[-1])


@torch.library.register_fake("tilewise::attention_training")
@torch.library.register_fake("tilewise::attention_training.masked")
def _(
    query: Tensor, key: Tensor, value: Tensor, options: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check_plain(query, key, value, options, mask)
    return _empty_outputs(query, value, packed=False)


@torch.library.register_fake("tilewise::attention_backward")
@torch.library.register_fake("tilewise::triton_backward")
def _(*arguments: Any) -> list[Tensor]:
    needed = arguments[BACKWARD_OWN - 1]
    arguments = complete(arguments[BACKWARD_OWN:])
    return _empty_gradients([arguments[index] for index in DIFFERENTIABLE], needed)


@torch.library.register_fake("tilewise::attention_training_backward")
def _(*arguments: Any) -> list[Tensor]:
    needed, query, key, value, _, mask, _ = arguments[BACKWARD_OWN - 1 :]
    return _empty_gradients((query, key, value, mask), needed)


@torch.library.register_fake("tilewise::explain_attention")
@torch.library.register_fake("tilewise::explain_gemm")
@torch.library.register_fake("tilewise::explain_ffn")
def _(*_: Any) -> str:
    raise Unsupported("explain reads strides and addresses: it needs real tensors, not meta or fake ones")


# The operations around it


@torch.library.register_fake("tilewise::gemm")
def _(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    _check(_check_gemm, (a, b, *others))
    return a.new_empty((a.shape[0], b.shape[0]))


@torch.library.register_fake("tilewise::ffn_forward")
def _(x: Tensor, up: Tensor, down: Tensor, *others: Any) -> Tensor:
    _check(_check_ffn, (x, up, down, *others))
    return x.new_empty((x.shape[0], down.shape[0]))


@torch.library.register_fake("tilewise::ffn_forward_kept")
def _(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None = None, *others: Any) -> tuple[Tensor, ...]:
    _check(_check_ffn, (x, up, down, gate, *others))
    rows, hidden = x.shape[0], up.shape[0]
    return (
        x.new_empty((rows, down.shape[0])),
        x.new_empty((rows, hidden)),
        x.new_empty(0 if gate is None else (rows, hidden)),
    )


@torch.library.register_fake("tilewise::ffn_backward")
def _(
    grad_out: Tensor,
    needed: list[bool],
    up_product: Tensor | None,
    gate_product: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    return _empty_needed(arguments, needed)


@torch.library.register_fake("tilewise::norm_forward")
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    layer: bool,
    *others: Any,
) -> tuple[Tensor, ...]:
    _check(_check_norm, (x, residual, weight, bias, epsilon, layer, *others))
    rows, statistics = x.shape[0], _statistics_dtype(x)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(rows, dtype=statistics),
        x.new_empty(rows if layer else 0, dtype=statistics),
    )


@torch.library.register_fake("tilewise::norm_backward")
def _(
    grad_y: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    needed: list[bool],
    *_: Any,
) -> list[Tensor]:
    return _empty_needed((x, weight, bias), needed)


@torch.library.register_fake("tilewise::rope")
def _(q: Tensor, k: Tensor | None, *others: Any) -> list[Tensor]:
    _check(_check_rope, (q, k, *others))
    return [empty_beside(x, x.shape[-1]) for x in (q, k) if x is not None]


@torch.library.register_fake("tilewise::rope_into_cache")
def _(q: Tensor, *others: Any) -> Tensor:
    _check(_check_rope_into_cache, (q, *others))
    return empty_beside(q, q.shape[-1])
