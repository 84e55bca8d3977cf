"""Both passes of attention over several ranks, as one function that autograd records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise._errors import Unsupported
from tilewise.distributed.gather import Gather
from tilewise.distributed.heads import HeadExchange
from tilewise.distributed.messages import Mailbox
from tilewise.distributed.pieces import Heads, Inputs, Problem, Sums
from tilewise.distributed.ring import Ring

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass(eq=False)
class Call:
    """A call that all ranks agree on: how its rows meet, and whether heads are exchanged before."""

    problem: Problem
    inner: Ring | Gather
    parts: tuple[Heads, ...]  # of the problem's heads, computed one after another
    exchange: HeadExchange | None = None  # of queries
    key_exchange: HeadExchange | None = None
    heads: tuple[Heads, ...] = ()  # of each rank, where they are exchanged
    mask_of_rows: bool = True  # a row for each query, not one for all
    with_lse: bool = True  # which may have a gradient
    boxes: tuple[Mailbox, ...] = ()

    def _spread(self, x: Tensor) -> Tensor:
        return x if self.exchange is None else self.exchange.spread(x, [h.at for h in self.heads])

    def _spread_keys(self, x: Tensor) -> Tensor:
        return x if self.key_exchange is None else self.key_exchange.spread(x, [h.keys for h in self.heads])

    def _collect(self, x: Tensor, heads: int) -> Tensor:
        return x if self.exchange is None else self.exchange.collect(x, [h.at for h in self.heads], heads)

    def _collect_keys(self, x: Tensor, heads: int) -> Tensor:
        slices = [h.keys for h in self.heads]
        return x if self.key_exchange is None else self.key_exchange.collect(x, slices, heads)

    def _mask_slices(self, mask: Tensor) -> list[slice]:
        return [slice(0, 1) if mask.shape[1] == 1 else heads.at for heads in self.heads]

    def _spread_mask(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or self.exchange is None:
            return mask
        mask = mask[(None,) * (4 - mask.dim())]
        slices = self._mask_slices(mask)
        if not self.mask_of_rows:
            return mask[:, slices[self.exchange.box.rank]]
        return self.exchange.spread(mask, slices)

    def _collect_mask(self, gradient: Tensor | None, mask: Tensor | None) -> Tensor | None:
        if gradient is None or mask is None:
            return None
        if self.exchange is None:
            return gradient
        shape = mask.shape
        mask = mask[(None,) * (4 - mask.dim())]
        slices = self._mask_slices(mask)
        if not self.mask_of_rows:
            whole = torch.zeros_like(mask, dtype=gradient.dtype)
            whole[:, slices[self.exchange.box.rank]] = gradient
            return whole.view(shape)
        return self.exchange.collect(gradient, slices, mask.shape[1]).view(shape)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        logit_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """out, lse, and what backward wants to have."""
        heads = q.shape[1]
        dtype, statistics = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
        q, k, v = self._spread(q), self._spread_keys(k), self._spread_keys(v)
        mask = self._spread_mask(mask)
        inputs = Inputs(q, mask, slopes, sinks, logit_scale)
        with _naming_device(q):
            o, lse = self._by_parts(
                lambda problem, at, keys_at: self.inner.forward(
                    problem, inputs.of_heads(at), k[:, keys_at], v[:, keys_at]
                )
            )
        out = self._collect(o.to(dtype), heads)
        saved = (q, k, v, mask, slopes, sinks, logit_scale, o, lse)
        return out, self._collect(lse.to(statistics), heads), saved

    def backward(
        self,
        saved: tuple[Tensor | None, ...],
        whole_mask: Tensor | None,
        heads: tuple[int, int],
        grad_out: Tensor,
        grad_lse: Tensor | None,
        mask_gradient: bool,
    ) -> Gradients:
        q, k, v, mask, slopes, sinks, logit_scale, o, lse = saved
        assert q is not None and k is not None and v is not None and o is not None and lse is not None
        inputs = Inputs(q, mask, slopes, sinks, logit_scale)
        if grad_lse is None and self.exchange is not None and self.with_lse:  # but perhaps on other ranks
            grad_lse = grad_out.new_zeros(grad_out.shape[:3], dtype=inputs.wide)
        grad_out, grad_lse = self._spread(grad_out), None if grad_lse is None else self._spread(grad_lse)
        sums = Sums.of(inputs, mask_gradient)
        dtype = q.dtype if self.exchange is None else inputs.wide  # what ranks add up is not rounded before

        def of_part(problem: Problem, at: slice, keys_at: slice) -> list[Tensor]:
            found = self.inner.backward(
                problem,
                inputs.of_heads(at),
                k[:, keys_at],
                v[:, keys_at],
                (o[:, at], lse[:, at]),
                (grad_out[:, at], None if grad_lse is None else grad_lse[:, at]),
                sums.of_heads(at),
            )
            return [x.to(dtype) for x in found]

        with _naming_device(q):
            dq, dk, dv = self._by_parts(of_part)
        dq = self._collect(dq, heads[0])
        dk, dv = (self._collect_keys(x, heads[1]) for x in (dk, dv))
        return dq, dk, dv, self._collect_mask(sums.mask, whole_mask), sums.sinks, sums.logit_scale

    def _by_parts(self, run: Callable[[Problem, slice, slice], Sequence[Tensor]]) -> Iterator[Tensor]:
        """What `run` gives for the parts of the heads, put together."""
        whole = self.problem
        of_parts = [run(whole.with_heads(part), *whole.heads.places(part)) for part in self.parts]
        results = [list(found) for found in zip(*of_parts, strict=True)]
        del of_parts
        for found in results:
            yield found[0] if len(found) == 1 else torch.cat(found, 1)
            found.clear()  # before the next are put together


@contextmanager
def _naming_device(rows: Tensor) -> Iterator[None]:
    """Says where it was that no kernel, or not the one asked for, takes a piece."""
    try:
        yield
    except RuntimeError as error:
        _, found, reason = str(error).partition("tilewise.Unsupported: ")
        if not found:
            raise
        raise Unsupported(f"on {rows.device} no kernel takes a piece of this attention: {reason}") from None


@contextmanager
def _telling(boxes: Sequence[Mailbox]) -> Iterator[None]:
    """Tells other ranks of an exception, for which they would wait."""
    try:
        yield
    except Exception as error:
        for box in boxes:
            box.leave_word(error)
        raise


class Attention(torch.autograd.Function):
    """out and lse of query, key, value, mask, slopes, sinks and logit_scale, by the call that comes last."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = arguments
        with _telling(call.boxes):
            out, lse, saved = call.forward(*tensors)
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, *saved)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, mask, _, sinks, logit_scale, *saved = ctx.saved_tensors
        if grad_out is None:
            grad_out = q.new_zeros((*q.shape[:3], v.shape[3]))
        with _telling(ctx.call.boxes):
            found = ctx.call.backward(
                tuple(saved), mask, (q.shape[1], k.shape[1]), grad_out, grad_lse, ctx.needs_input_grad[3]
            )
        dq, dk, dv, dmask, dsinks, dlogit = (
            None if x is None else x.to(like.dtype)
            for x, like in zip(found, (q, k, v, mask, sinks, logit_scale), strict=True)
        )
        return dq, dk, dv, dmask, None, dsinks, dlogit, None
