"""What PyTorch wants to know of the operators of attention, and the shortest ways to call them.

Kernels and schemas are in C++. Here are gradients, autocast and vmap; calls without data are in `_meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import (
    _meta,  # noqa: F401  its registrations
    _triton,
)
from tilewise._binding import (
    BACKWARD_OWN,
    DEFAULTS,
    DIFFERENTIABLE,
    INDEX,
    LIBRARY,
    attention_backward,
    attention_forward,
    attention_inference,
    attention_inference_masked,
    attention_training,
    attention_training_backward,
    attention_training_masked,
    complete,
    triton_backward,
    triton_forward,
)
from tilewise._errors import DENSE_NAMES, Unsupported, translated
from tilewise._vmap import complete_dims, vmap_backward, vmap_forward

# Gradients


def _save(ctx: Any, arguments: Sequence[Any], out: Tensor, lse: Tensor) -> None:
    slopes = arguments[INDEX["alibi_slopes"]]
    if slopes is not None and slopes.requires_grad:
        raise Unsupported("alibi_slopes: no gradient is computed for them; detach them")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, *(arguments[index] for index in DIFFERENTIABLE))
    ctx.arguments = list(arguments)
    for index in DIFFERENTIABLE:
        ctx.arguments[index] = None


def _gradients(
    ctx: Any, needed: list[bool], grad_out: Tensor | None, grad_lse: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the differentiable arguments, None for those not needed."""
    out, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for index, tensor in zip(DIFFERENTIABLE, tensors, strict=True):
        arguments[index] = tensor
    arguments[INDEX["deterministic"]] |= torch.are_deterministic_algorithms_enabled()
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    computed = iter(backward((grad_out, grad_lse, out, lse, needed, *arguments)))
    return [next(computed) if need else None for need in needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs, *output)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad  # shorter than the arguments, where defaults were left out
    needed = [index < len(asked) and asked[index] for index in DIFFERENTIABLE]
    result: list[Tensor | None] = [None] * len(asked)
    for index, gradient in zip(DIFFERENTIABLE, _gradients(ctx, needed, grad_out, grad_lse), strict=True):
        if gradient is not None:
            result[index] = gradient
    return tuple(result)


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise Unsupported("attention has no second derivative: its gradient cannot be differentiated again")


def _no_forward_derivative(ctx: Any, *_: Any) -> None:
    raise Unsupported(
        "attention has no forward-mode derivative: use grad, vjp or jacrev instead of jvp or jacfwd"
    )


for _name in ("attention", "triton"):
    torch.library.register_autograd(
        f"tilewise::{_name}_forward", _differentiate, setup_context=_setup_context
    )
    torch.library.register_autograd(f"tilewise::{_name}_backward", _no_second_derivative)


# Calls. What register_autograd makes of an operator serves tracing and direct use. It takes every argument
# through Python more than once, many times the cost of a small attention, and does not know torch.func; so
# eager calls go round it.


def traced() -> bool:
    """Whether the call becomes part of a graph: that of torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def eager() -> bool:
    """Whether a call is not being traced, transformed or differentiated forward."""
    return not (traced() or _transformed())


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _below_autograd(operator: torch._ops.OpOverload, arguments: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator._op(*arguments)


def _forward_operator(arguments: Sequence[Any]) -> torch._ops.OpOverload:
    return triton_forward if _triton.chosen(arguments) else attention_forward


def _backward_operator(arguments: Sequence[Any]) -> torch._ops.OpOverload:
    return triton_backward if _triton.chosen(arguments[BACKWARD_OWN:]) else attention_backward


def forward(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """attention_forward, by the shortest way that is right."""
    if traced():
        return _forward_operator(arguments)(*arguments)
    if _transformed():
        return _TransformedForward.apply(*autocast(arguments))
    if torch.is_grad_enabled():
        differentiable = [arguments[index] for index in DIFFERENTIABLE]
        if any(
            x is not None and x.requires_grad for x in (*differentiable, arguments[INDEX["alibi_slopes"]])
        ):
            arguments = autocast(arguments)  # a gradient belongs to what was cast, so before it is recorded
            return _EagerForward.apply(*(arguments[index] for index in DIFFERENTIABLE), arguments)
    return _below_autograd(_forward_operator(arguments), arguments)


def backward(arguments: tuple[Any, ...]) -> Sequence[Tensor]:
    """attention_backward, likewise. It raises the library's exceptions, as nothing round it makes them."""
    operator = _backward_operator(arguments)
    if traced():
        return operator(*arguments)
    try:
        if _transformed() or torch.is_grad_enabled():
            return _TransformedBackward.apply(*arguments)
        return _below_autograd(operator, arguments)
    except RuntimeError as error:
        raise translated(error, {}, DENSE_NAMES) from None


class _EagerForward(torch.autograd.Function):
    """attention_forward of the last input. Before it come those of its arguments that have a gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        arguments = inputs[-1]
        out, lse = _below_autograd(_forward_operator(arguments), arguments)
        _save(ctx, arguments, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, list(ctx.needs_input_grad[:-1]), grad_out, grad_lse), None)


class _PlainCalls(dict[tuple[Any, ...], tuple[Tensor, Callable[..., Tensor]]]):
    """From (is_causal, scale, enable_gqa, allow_tf32) to the operators' options and to the call that records.

    Looked up once a call; made when first asked for.
    """

    most = 64  # classes are large, and a scale may be another in every call

    def __missing__(self, settings: tuple[Any, ...]) -> tuple[Tensor, Callable[..., Tensor]]:
        is_causal, scale, enable_gqa, allow_tf32 = settings
        flags = (is_causal, enable_gqa, allow_tf32)
        known = all(not isinstance(flag, Tensor) and flag in (True, False) for flag in flags)
        if not known or not isinstance(scale, (float, int, NoneType)):
            raise TypeError  # the general way says what is wrong
        options = torch.tensor([*flags, scale is not None, scale or 0.0], dtype=torch.float64, device="cpu")
        if type(options) is not Tensor:  # a fake one is not to be kept
            raise TypeError
        if len(self) >= self.most:
            self.clear()
        call = options, _training(settings, options)
        self[settings] = call
        return call


plain_calls = _PlainCalls()


def _training(settings: tuple[Any, ...], options: Tensor) -> Callable[..., Tensor]:
    """attention_training of query, key, value and perhaps a mask, recorded.

    Settings are in the class, as whatever is given to a node or kept in it costs more than a lookup.
    """

    class Training(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
        ) -> Tensor:
            if mask is None:
                out, lse = _attention_training(query, key, value, options)
            else:
                out, lse = _attention_training_masked(query, key, value, options, mask)
            ctx.save_for_backward(query, key, value, mask, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
            query, key, value, mask, out, lse = ctx.saved_tensors
            needed = list(ctx.needs_input_grad)
            deterministic = torch.are_deterministic_algorithms_enabled()
            own = (grad_out, None, out, lse)
            if torch.is_grad_enabled() or not eager():
                given = dict(
                    zip(("is_causal", "scale", "enable_gqa", "allow_tf32"), settings, strict=True),
                    **dict(query=query, key=key, value=value, attn_mask=mask, deterministic=deterministic),
                )
                arguments = (given.get(name, DEFAULTS[index]) for name, index in INDEX.items())
                all_needed = needed + [False] * (len(DIFFERENTIABLE) - len(needed))
                computed = iter(backward((*own, all_needed, *arguments)))
            else:
                rows = (query, key, value, options, mask)
                try:
                    computed = iter(_attention_training_backward(*own, needed, *rows, deterministic))
                except RuntimeError as error:
                    raise translated(error, {}, DENSE_NAMES) from None
            return tuple(next(computed) if need else None for need in needed)

    # Function.apply without its care for functorch's transforms, of which there is none in an eager call. It
    # is a third of what recording a gradient costs.
    return super(torch.autograd.Function, Training).apply


_attention_training = attention_training._op  # OpOverload.__call__ would only call it
_attention_training_masked = attention_training_masked._op
_attention_training_backward = attention_training_backward._op


class _TransformedForward(torch.autograd.Function):
    """attention_forward, as torch.func wants it."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _below_autograd(_forward_operator(arguments), arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_no_forward_derivative)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        return vmap_forward(forward, info.batch_size, dims, arguments)


class _TransformedBackward(torch.autograd.Function):
    """attention_backward, as torch.func wants it and where its own gradient might be asked for."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(_backward_operator(arguments), arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_derivative)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        gradients, gradient_dims = vmap_backward(backward, info.batch_size, dims, arguments)
        return tuple(gradients), tuple(gradient_dims)


def explain(arguments: tuple[Any, ...]) -> str:
    """explain_attention of the forward pass, and of the backward pass where a gradient would be recorded."""
    if torch.compiler.is_compiling():  # a graph has no place for text; without fullgraph it is broken here
        raise Unsupported("explain gives text, which cannot be compiled: call it outside the graph")
    tensors = [arguments[index] for index in DIFFERENTIABLE]
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    text = _triton.explained([], arguments)
    if any(needed):
        text += _triton.explained(needed, arguments)
    return text.rstrip()


def named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """attention_forward's arguments by their names."""
    return dict(zip(INDEX, arguments, strict=True))


# Autocast: rows in the type it asks for, as in PyTorch's own attention. Statistics and f32 masks keep theirs.


def _cast_rows(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Any, ...]:
    """query, key, value and mask in `dtype`."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        lower = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if tensor is not None and lower else tensor

    if mask is not None and mask.dtype != torch.float32:
        mask = cast(mask)
    return cast(query), cast(key), cast(value), mask


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast asks for where the tensor is; None where it asks for none."""
    if not torch._C._is_any_autocast_enabled():  # the common case, at a fraction of the cost
        return None
    kind = tensor.device.type
    known = kind in ("cpu", "cuda", "xpu")  # torch raises for those without autocast, such as meta
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None


def autocast(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = autocast_dtype(arguments[0])
    return arguments if dtype is None else (*_cast_rows(dtype, *arguments[:4]), *arguments[4:])


def _register_autocast(operator: torch._ops.OpOverload, device_type: str, key: str) -> None:
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    names = [argument.name for argument in operator._schema.arguments]
    mask = (names.index("attn_mask") if "attn_mask" in names else len(names)) - 3  # after the rows

    def kernel(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
        rest = list(others)
        if query.device.type == device_type:  # options and seeds on the CPU lead here, too
            given = rest[mask] if mask < len(rest) else None
            dtype = torch.get_autocast_dtype(device_type)
            query, key, value, cast = _cast_rows(dtype, query, key, value, given)
            if given is not None:
                rest[mask] = cast
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return operator(query, key, value, *rest)

    LIBRARY.impl(operator.name().removeprefix("tilewise::"), kernel, key)


for _key in ("AutogradCPU", "AutogradCUDA"):  # the gradient is recorded round them, in _Training
    for _name in ("attention_training", "attention_training.masked", "attention_training_backward"):
        LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)
for _operator in (attention_forward, triton_forward, attention_inference, attention_inference_masked):
    _register_autocast(_operator, "cpu", "AutocastCPU")
    _register_autocast(_operator, "cuda", "AutocastCUDA")
_register_autocast(triton_forward, "xpu", "AutocastXPU")


# vmap


def _register_vmap(forward: torch._ops.OpOverload, backward: torch._ops.OpOverload) -> None:
    def mapped_forward(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        dims, arguments = complete_dims(dims), complete(arguments)
        return vmap_forward(lambda a: forward(*a), info.batch_size, dims, arguments)

    def mapped_backward(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        own = arguments[:BACKWARD_OWN]
        dims = (*dims[:BACKWARD_OWN], *complete_dims(dims[BACKWARD_OWN:]))
        arguments = (*own, *complete(arguments[BACKWARD_OWN:]))
        return vmap_backward(lambda a: backward(*a), info.batch_size, dims, arguments)

    torch.library.register_vmap(forward, mapped_forward)
    torch.library.register_vmap(backward, mapped_backward)


_register_vmap(attention_forward, attention_backward)
_register_vmap(triton_forward, triton_backward)
