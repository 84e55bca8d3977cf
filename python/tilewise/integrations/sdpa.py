"""Routes `torch.nn.functional.scaled_dot_product_attention` to Tilewise, for models that call it.

    from tilewise.integrations import sdpa

    with sdpa.use():        # or sdpa.enable() ... sdpa.disable()
        model(x)
    print(sdpa.explain())   # which calls went where, and why

What is reached, while it is on:

- Every call through `torch.nn.functional`, so `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, timm and
  diffusers, on every device Tilewise has kernels for, with dropout, Dv ≠ D, any leading dimensions and masks
  that need a gradient. This is a replacement of the function. `nn.MultiheadAttention` calls it where
  `need_weights=False`; its fast path in evaluation, which does not, is switched off meanwhile
  (`torch.backends.mha`).
- On the CPU, from torch 2.11 on, calls that do not go through `torch.nn.functional`: C++, a name imported
  before, a program that was exported before. They come by torch's hook for flash attention
  (`torch.nn.attention.register_flash_attention_impl`), which torch uses for calls without dropout, with
  Dv = D, four dimensions and no gradient of the mask.
- Calls on DTensors whose sequence is spread over ranks, by `tilewise.distributed.attention`. So `use` around
  torch's `context_parallel` makes it Tilewise's.
- `torch.compile` and `torch.export`: what is traced while it is on contains Tilewise's operators. A compiled
  function is traced anew where it was switched on or off since; an exported program keeps what it has.

What Tilewise does not take goes to torch's own function: float64, nested and sparse tensors and other
subclasses, calls under `sdpa_kernel` without flash attention, malformed calls (for torch to complain of).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tilewise
from tilewise import _binding, _ops, _triton
from tilewise._errors import InvalidArgument, Unsupported

__all__ = ["calls", "disable", "enable", "explain", "is_enabled", "use"]

_BY_FUNCTION = "tilewise, in place of torch's function"
_BY_HOOK = "tilewise, by torch's hook for flash attention"
_TORCH = "torch"

_torch_function = F.scaled_dot_product_attention
_HAS_HOOK = hasattr(attention, "restore_flash_attention_impl")  # torch 2.10 can set it, but not undo that
# Where some kernel is: the library's own, or the one in Triton.
_DEVICES: tuple[str, ...] = ("cpu", "meta")
if {*_binding.attention_kernels()} - {"simd", "reference"}:
    _DEVICES += ("cuda",)
if _triton.installed():
    _DEVICES += ("cuda", "xpu")
_lock = threading.RLock()
_counts: Counter[tuple[str, str]] = Counter()
_given_up = threading.local()  # .now: torch's function is running what Tilewise did not take


class _State:
    """Whether calls are routed: switched on for good, or by blocks of `use`."""

    active = False
    enabled = False
    blocks = 0
    fast_path = True
    previous_hook: str | None = None


def enable() -> None:
    """Routes calls to Tilewise until `disable`. Doing it twice changes nothing. Counts begin anew.

    >>> enable()
    >>> x = torch.randn(1, 2, 8, 16)
    >>> out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> disable()
    >>> print(explain())
    scaled_dot_product_attention, 1 call
      1 tilewise, in place of torch's function
    """
    with _lock:
        _refuse_inside_context_parallel()
        _State.enabled = True
        _switch()


def disable() -> None:
    """Undoes `enable`. Inside a block of `use`, calls are routed until its end."""
    with _lock:
        _State.enabled = False
        _switch()


@contextlib.contextmanager
def use() -> Iterator[None]:
    """Routes calls to Tilewise within a block; blocks may be nested, and leave everything as it was.

    The function is the process's own, so other threads' calls are routed too.

    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    >>> with use():
    ...     out = layer(torch.randn(2, 10, 32))
    >>> calls()
    {"tilewise, in place of torch's function": 1}
    """
    with _lock:
        _refuse_inside_context_parallel()
        _State.blocks += 1
        _switch()
    try:
        yield
    finally:
        with _lock:
            _State.blocks -= 1
            _switch()


def is_enabled() -> bool:
    """Whether calls are being routed."""
    return _State.active


def calls() -> dict[str, int]:
    """How many calls went where since calls were last routed anew, most first.

    Those that went to torch name the reason. Compiled code is counted where it was traced, not where it runs.
    """
    with _lock:
        return {_told(*route): count for route, count in _counts.most_common()}


def explain() -> str:
    """`calls` in words, a line for each kind.

    >>> with use():
    ...     x = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    ...     out = F.scaled_dot_product_attention(x, x, x)
    >>> print(explain())
    scaled_dot_product_attention, 1 call
      1 torch: query: only the reference kernel supports float64
    """
    told = calls()
    total = sum(told.values())
    head = f"scaled_dot_product_attention, {total} call{'' if total == 1 else 's'}"
    return "\n".join([head, *(f"  {count} {route}" for route, count in told.items())])


def _told(route: str, reason: str) -> str:
    return f"{route}: {reason}" if reason else route


def _count(route: str, reason: str = "") -> None:
    with _lock:
        _counts[route, reason] += 1


_count_traced = torch.compiler.assume_constant_result(_count)


def _switch() -> None:
    """Brings torch into the state asked for."""
    wanted = _State.enabled or _State.blocks > 0
    if wanted == _State.active:
        return
    if wanted:
        _counts.clear()
        _State.fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        F.scaled_dot_product_attention = _routed
        _activate_hook()
        _State.active = True
        return
    _State.active = False  # whoever kept the function has torch's own from here on
    if F.scaled_dot_product_attention is _routed:
        F.scaled_dot_product_attention = _torch_function
    torch.backends.mha.set_fastpath_enabled(_State.fast_path)
    _restore_hook()


# In place of torch's function


@functools.wraps(_torch_function)
def _routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if not _State.active:
        return _torch_function(*arguments, **options)
    tracing = torch.compiler.is_compiling()
    count = _count_traced if tracing else _count
    attend: Callable[..., Tensor] = tilewise.scaled_dot_product_attention
    if _over_ranks(query, key, value):
        attend = _attend_over_ranks
    reason = _why_not(query, key, value, attn_mask, is_causal)
    if reason is None and tracing:
        count(_BY_FUNCTION)
        return attend(*arguments, **options)
    if reason is None:
        try:
            out = attend(*arguments, **options)
        except (InvalidArgument, Unsupported, TypeError) as error:
            reason = str(error)
        else:
            count(_BY_FUNCTION)
            return out
    count(_TORCH, reason)
    if tracing:
        return _torch_function(*arguments, **options)
    _given_up.now = True
    try:
        return _torch_function(*arguments, **options)
    finally:
        _given_up.now = False


def _why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> str | None:
    """Why a call is torch's, where that can be told beforehand; else None."""
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if x is None or isinstance(x, CausalBias):
            continue
        if not isinstance(x, Tensor):
            return f"{name}: not a tensor"
        if x.is_nested or x.layout is not torch.strided:
            return f"{name}: not a dense tensor"
        if is_traceable_wrapper_subclass(x) and (x is mask or not _over_ranks(query, key, value)):
            return f"{name}: a subclass of Tensor"
    if mask is not None and is_causal is not False:
        return "attn_mask: given with is_causal, which torch documents as an error"
    if query.dtype == torch.float64:
        return "query: only the reference kernel supports float64"
    if min(query.dim(), value.dim()) == 0:
        return "query: no dimensions"
    if not 1 <= query.shape[-1] <= 4096 or not 1 <= value.shape[-1] <= 4096:
        return "query: a head dimension outside 1 to 4096"
    if not torch._C._get_flash_sdp_enabled():  # torch.compile knows it under this name
        return "sdpa_kernel: flash attention is switched off"
    return None if query.device.type in _DEVICES else f"query: no kernel for device {query.device.type}"


# Over several ranks


def _over_ranks(*tensors: Tensor) -> bool:
    """Whether ranks have parts of the sequence."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return False
    return all(isinstance(x, dtensor.DTensor) and dtensor.Shard(2) in x.placements for x in tensors)


def _torch_context_parallel() -> Any:
    """torch's module of context_parallel, if that is on."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    handlers = {} if dtensor is None else dtensor.DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.get(torch.ops.aten._scaled_dot_product_flash_attention.default)
    return None if handler is None else sys.modules[handler.__module__]


def _refuse_inside_context_parallel() -> None:
    """It has put a function of its own in place of torch's. One put over it would not hear of other ranks."""
    module = None if _State.active else _torch_context_parallel()
    if module is not None and F.scaled_dot_product_attention in module._replaced_functions:
        raise Unsupported("sdpa: torch's context_parallel is on; switch Tilewise on around it, not inside")


def _attend_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *arguments: Any, **options: Any
) -> Tensor:
    from tilewise import distributed

    if mask is not None:
        raise Unsupported("attn_mask: not over several ranks, where torch gives no rank its rows")
    module = _torch_context_parallel()
    balanced = module is not None and module._cp_options.enable_load_balance  # head and tail to each rank
    layout = "zigzag" if balanced else "contiguous"
    out: Tensor = distributed.attention(query, key, value, None, *arguments, layout=layout, **options)
    return out


# By torch's hook: its operator for flash attention on the CPU


class _Override:
    """Tilewise in the place of torch's kernels, until removed."""

    def __init__(self) -> None:
        operators = torch.ops.aten
        forward = operators._scaled_dot_product_flash_attention_for_cpu.default
        backward = operators._scaled_dot_product_flash_attention_for_cpu_backward.default
        self._forward, self._backward = (torch.library.get_kernel(op, "CPU") for op in (forward, backward))
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # it means to override
            for operator, kernel in ((forward, self.forward), (backward, self.backward)):
                name = operator._schema.name.removeprefix("aten::")
                self._library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)

    def remove(self) -> None:
        self._library._destroy()

    def forward(
        self,
        keyset: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        given_up = getattr(_given_up, "now", False)
        reason = _hook_reason(query, dropout_p)
        if reason is None and not given_up:
            arguments = (query, key, value, attn_mask, 0.0, is_causal, scale, True)
            out, lse = _ops._below_autograd(_binding.attention_forward, arguments)
            _count(_BY_HOOK)
            return _laid_out(out, torch.empty_like(query)), _laid_out(lse, _positions_first(lse))
        if not given_up:
            _count(_TORCH, reason or "")
        options = {"attn_mask": attn_mask, "scale": scale}
        return self._forward.call_boxed(keyset, query, key, value, dropout_p, is_causal, **options)

    def backward(
        self,
        keyset: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        if _hook_reason(query, dropout_p) is None:
            needed = [True, True, True, False, False]
            arguments = (query, key, value, attn_mask, 0.0, is_causal, scale, True)
            found = _ops._below_autograd(
                _binding.attention_backward, (grad_out, None, out, lse, needed, *arguments)
            )
            return tuple(_laid_out(x, _positions_first(x)) for x in found)
        rows = (grad_out, query, key, value, out, lse, dropout_p, is_causal)
        return self._backward.call_boxed(keyset, *rows, attn_mask=attn_mask, scale=scale)


def _hook_reason(query: Tensor, dropout_p: float) -> str | None:
    if query.dtype == torch.float64:
        return "query: only the reference kernel supports float64"
    return "dropout_p: torch's hook gives no seed" if dropout_p > 0 else None


def _positions_first(like: Tensor) -> Tensor:
    """Empty, [B, H, S, ...] stored as [B, S, H, ...]: what torch.compile expects of torch's kernels."""
    return torch.empty_like(like.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _laid_out(result: Tensor, place: Tensor) -> Tensor:
    return result if result.stride() == place.stride() else place.copy_(result)


def _activate_hook() -> None:
    if not _HAS_HOOK:
        return
    _State.previous_hook = attention.current_flash_attention_impl()
    attention.register_flash_attention_impl("tilewise", register_fn=_Override)
    attention.activate_flash_attention_impl("tilewise")


def _restore_hook() -> None:
    if not _HAS_HOOK:
        return
    if attention.current_flash_attention_impl() != "tilewise":
        return  # somebody activated another one since
    attention.restore_flash_attention_impl()
    if _State.previous_hook is not None:
        attention.activate_flash_attention_impl(_State.previous_hook)
