"""Attention in Triton: from an operator's arguments to launches.

Nothing is copied or repeated: kernels read the caller's tensors in any strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise._binding import INDEX
from tilewise._meta import laid_out_beside
from tilewise._triton import kernels
from tilewise._triton.kernels import Dropout, Score, Shape, Statistics, View


@dataclass(frozen=True)
class Tiles:
    """How a problem is cut, as the kernels name it."""

    DIM: int
    DIM_V: int
    PIECE: int
    PIECE_V: int
    BLOCK_Q: int
    BLOCK_K: int
    PRECISION: str  # of products: "ieee", "tf32" or "widened"
    num_warps: int = 4
    num_stages: int = 1


def tiles_of(query: Tensor, dim_v: int, allow_tf32: bool, backward: bool) -> Tiles:
    """Tiles that fit into 64 KiB of shared memory, which is what AMD's GPUs have. Nobody timed others."""
    wide = query.dtype == torch.float32
    dim = query.shape[-1]
    most = 64 if wide else 128
    piece, piece_v = (max(16, min(triton.next_power_of_2(n), most)) for n in (dim, dim_v))
    precision = "tf32" if allow_tf32 and torch.version.hip is None else "ieee"
    if query.dtype == torch.bfloat16 and kernels.INTERPRETED:
        precision = "widened"
    block_q, block_k = (32, 32) if wide or backward else (64, 32)
    return Tiles(dim, dim_v, piece, piece_v, block_q, block_k, precision)


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **settings: Any) -> None:
    """The one way to launch: on the tensors' device, unless there is nothing to do."""
    if programs > 0:
        with _current(device):
            kernel[(programs,)](*arguments, **settings)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


class Call:
    """The arguments of an operator, as kernels take them."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        def named(name: str) -> Any:
            return arguments[INDEX[name]]

        self.q, self.k, self.v = arguments[:3]
        self.mask, self.sinks = named("attn_mask"), named("sinks")
        self.allow_tf32 = named("allow_tf32")
        self.device = self.q.device
        batch, heads, length_q, dim = self.q.shape
        length_k = self.k.shape[2]
        group = heads // self.k.shape[1] if heads else 1
        offset = length_k - length_q if named("bottom_right") else 0
        band = _band(named("is_causal"), named("window_left"), named("window_right"), length_q + length_k)
        self.shape = Shape(batch, heads, group, length_q, length_k, offset, *band)
        scale = named("scale")
        self.score = Score(
            scale=1 / math.sqrt(dim) if scale is None else scale,
            softcap=named("softcap") or None,
            slopes=_slopes(named("alibi_slopes"), batch),
            mask=None if self.mask is None else view(self.mask.expand(batch, heads, length_q, length_k)),
            dropout=_dropout(named("dropout_p"), named("dropout_seed"), self.device),
        )

    def tiles(self, backward: bool) -> Tiles:
        return tiles_of(self.q, self.v.shape[-1], self.allow_tf32, backward)

    def rows(self) -> tuple[View, View, View]:
        return view(self.q), view(self.k), view(self.v)

    def empty_statistic(self) -> Tensor:
        return self.q.new_empty(self.q.shape[:-1], dtype=torch.float32)

    def optional_sinks(self) -> View | None:
        return None if self.sinks is None else view(self.sinks)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **settings: Any) -> None:
        launch(kernel, programs, self.device, *arguments, **settings)


def view(x: Tensor) -> View:
    return View(x, x.stride())


def _band(causal: bool, left: int | None, right: int | None, most: int) -> tuple[int | None, int | None]:
    """How many keys a query sees to the left and to the right of its own; (None, None) where it sees all."""
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None, None
    return tuple(most if side is None else min(side, most) for side in (left, right))  # type: ignore[return-value]


def _slopes(slopes: Tensor | None, batch: int) -> View | None:
    return None if slopes is None else view(slopes.expand(batch, slopes.shape[-1]))


def _dropout(probability: float, seed: Tensor | None, device: torch.device) -> Dropout | None:
    if probability == 0.0 or seed is None:
        return None
    # In f32, as all kernels have it.
    probability = float(torch.tensor(probability, dtype=torch.float32, device="cpu"))
    threshold = min(int(probability * 2**16 + 0.5), 2**16 - 1)
    factor = 2**16 / (2**16 - threshold) if probability < 1 else 0.0
    return Dropout(seed.to(device), threshold, factor)


def forward(arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """out and lse."""
    call = Call(arguments)
    shape, tiles = call.shape, call.tiles(backward=False)
    out, lse = laid_out_beside(call.q, call.v.shape[-1]), call.empty_statistic()
    count = triton.cdiv(shape.length_q, tiles.BLOCK_Q)
    programs = count * triton.cdiv(tiles.DIM_V, tiles.PIECE_V) * shape.batch * shape.heads
    given = (*call.rows(), view(out), view(lse), call.optional_sinks())
    call.launch(kernels.forward, programs, *given, call.score, shape, count, **asdict(tiles))
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    arguments: Sequence[Any],
) -> list[Tensor]:
    """The gradients that are needed, of query, key, value, attn_mask and sinks in this order."""
    call = Call(arguments)
    shape, tiles = call.shape, call.tiles(backward=True)
    settings = asdict(tiles)
    tiles_q, tiles_k = triton.cdiv(shape.length_q, tiles.BLOCK_Q), triton.cdiv(shape.length_k, tiles.BLOCK_K)
    pieces, pieces_v = triton.cdiv(tiles.DIM, tiles.PIECE), triton.cdiv(tiles.DIM_V, tiles.PIECE_V)
    heads = shape.batch * shape.heads

    if call.q.dtype == torch.float32:
        statistics = _statistics_again(call, tiles, grad_out, grad_lse)
    else:
        statistics = _statistics_of(call, tiles, grad_out, grad_lse, out, lse)
    inputs = (*call.rows(), view(grad_out), statistics)
    rest = (call.score, shape)
    d_q, d_k, d_v = (
        laid_out_beside(x, x.shape[-1]) if need else None
        for x, need in zip((call.q, call.k, call.v), needed, strict=False)
    )
    if d_q is not None:
        programs = tiles_q * pieces * heads
        call.launch(kernels.backward_q, programs, *inputs, view(d_q), *rest, tiles_q, **settings)
    if d_k is not None or d_v is not None:
        programs = tiles_k * max(pieces, pieces_v) * (heads // shape.group)
        found = (None if x is None else view(x) for x in (d_k, d_v))
        call.launch(kernels.backward_kv, programs, *inputs, *found, *rest, tiles_k, **settings)
    d_mask = _mask_gradient(call, tiles, inputs) if needed[3] else None
    d_sinks = _sinks_gradient(call.sinks, statistics) if needed[4] else None
    return [x for x in (d_q, d_k, d_v, d_mask, d_sinks) if x is not None]


def _statistics_again(call: Call, tiles: Tiles, grad_out: Tensor, grad_lse: Tensor | None) -> Statistics:
    shape = call.shape
    statistics = Statistics(*(view(call.empty_statistic()) for _ in range(3)))
    count = triton.cdiv(shape.length_q, tiles.BLOCK_Q)
    d_lse = None if grad_lse is None else view(grad_lse)
    given = (*call.rows(), view(grad_out), d_lse, call.optional_sinks(), statistics, call.score)
    programs = count * shape.batch * shape.heads
    call.launch(kernels.statistics_again, programs, *given, shape, count, **asdict(tiles))
    return statistics


def _statistics_of(
    call: Call, tiles: Tiles, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> Statistics:
    shape, delta = call.shape, call.empty_statistic()
    count = triton.cdiv(shape.length_q, tiles.BLOCK_Q)
    d_lse = None if grad_lse is None else view(grad_lse)
    settings = {name: getattr(tiles, name) for name in ("DIM_V", "PIECE_V", "BLOCK_Q", "num_warps")}
    given = view(out), view(grad_out), d_lse, view(delta)
    call.launch(kernels.delta_of, count * shape.batch * shape.heads, *given, shape, count, **settings)
    return Statistics(view(lse), None, view(delta))


def _mask_gradient(call: Call, tiles: Tiles, inputs: Sequence[Any]) -> Tensor:
    mask, shape = call.mask, call.shape
    gradient = mask.new_empty(mask.shape)
    whole = gradient[(None,) * (4 - mask.dim())]
    extents = tuple(whole.shape)
    batch, heads, length_q, length_k = extents
    if 0 in (shape.batch, shape.heads, shape.length_q, shape.length_k):
        return gradient.zero_()
    programs = batch * heads * triton.cdiv(length_q, tiles.BLOCK_Q) * triton.cdiv(length_k, tiles.BLOCK_K)
    found = view(whole)
    call.launch(kernels.backward_mask, programs, *inputs, found, call.score, shape, extents, **asdict(tiles))
    return gradient


def _sinks_gradient(sinks: Tensor, statistics: Statistics) -> Tensor:
    """A sink is a key whose value is 0: its dP is 0."""
    shift: Tensor = statistics.shift.data
    weights = torch.exp(sinks[:, None] - torch.where(shift == -torch.inf, torch.inf, shift))
    if statistics.inverse is not None:
        weights = weights * statistics.inverse.data
    return -(weights * statistics.delta.data).sum((0, 2)).to(sinks.dtype)
