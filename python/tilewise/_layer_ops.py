"""The operators of a layer around attention: their gradients, and the shortest ways to call them.

Kernels are in C++. Rows are [M, ...] here; `functional` folds other dimensions into M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise import _ops
from tilewise._errors import Unsupported, translated
from tilewise._vmap import slices

gemm = torch.ops.tilewise.gemm.default
explain_gemm = torch.ops.tilewise.explain_gemm.default
ffn_forward = torch.ops.tilewise.ffn_forward.default
ffn_forward_kept = torch.ops.tilewise.ffn_forward_kept.default
ffn_backward = torch.ops.tilewise.ffn_backward.default
explain_ffn = torch.ops.tilewise.explain_ffn.default
norm_forward = torch.ops.tilewise.norm_forward.default
norm_backward = torch.ops.tilewise.norm_backward.default
rope = torch.ops.tilewise.rope.default
rope_into_cache = torch.ops.tilewise.rope_into_cache.default


def call(operator: torch._ops.OpOverload, *arguments: Any) -> Any:
    """The operator, by the shortest way that is right.

    What register_autograd makes of it serves tracing. It takes every argument through Python more than once,
    does not know torch.func, and gives a forward-mode derivative of 0; so other calls go round it.
    """
    if _ops.traced():
        return operator(*arguments)
    if not _ops.eager():
        return _TRANSFORMED[operator](*arguments) if operator in _TRANSFORMED else operator(*arguments)
    if torch.is_grad_enabled():
        for x in arguments:
            if isinstance(x, Tensor) and x.requires_grad:
                return _EAGER[operator](*arguments) if operator in _EAGER else operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator._op(*arguments)


# Gradients

_aten = torch.ops.aten
_FFN_GRADIENTS = 7  # x, up, down, gate and the three biases: the first arguments, in that order


def _activated(activation: str, x: Tensor) -> Tensor:
    match activation:
        case "relu":
            return torch.relu(x)
        case "gelu":
            return torch.nn.functional.gelu(x)
        case "gelu_tanh":
            return torch.nn.functional.gelu(x, approximate="tanh")
        case "silu":
            return torch.nn.functional.silu(x)
    return x


def _through_activation(activation: str, gradient: Tensor, x: Tensor) -> Tensor:
    """Gradient of the activation's input x."""
    match activation:
        case "relu":
            return _aten.threshold_backward(gradient, x, 0)
        case "gelu":
            return _aten.gelu_backward(gradient, x)
        case "gelu_tanh":
            return _aten.gelu_backward(gradient, x, approximate="tanh")
        case "silu":
            return _aten.silu_backward(gradient, x)
    return gradient


def _gemm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _residual, activation, kernel, tf32 = _complete(gemm, inputs)
    ctx.save_for_backward(*tensors)
    ctx.options = activation, kernel, tf32


def _gemm_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b, bias, gate, gate_bias = ctx.saved_tensors
    activation, kernel, tf32 = ctx.options
    asked = ctx.needs_input_grad
    needed = [index < len(asked) and asked[index] for index in range(6)]
    gradient = gradient.contiguous()

    def product(x: Tensor, y: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return call(gemm, x, y, bias, None, None, residual, "none", kernel, tf32)

    d_up, d_gate = gradient, None
    if gate is not None:
        opened = product(a, gate, gate_bias)
        d_up = gradient * _activated(activation, opened)
        d_gate = _through_activation(activation, gradient * product(a, b, bias), opened)
    elif activation != "none":
        d_up = _through_activation(activation, gradient, product(a, b, bias))

    da = None
    if needed[0]:
        da = product(d_up, b.t())
        if d_gate is not None:
            da = product(d_gate, gate.t(), residual=da)
    result = [
        da,
        product(d_up.t(), a.t()) if needed[1] else None,
        d_up.sum(0, dtype=torch.float32).to(bias.dtype) if needed[2] else None,
        product(d_gate.t(), a.t()) if d_gate is not None and needed[3] else None,
        d_gate.sum(0, dtype=torch.float32).to(gate_bias.dtype) if d_gate is not None and needed[4] else None,
        gradient if needed[5] else None,
    ]
    return (*result, None, None, None)[: len(asked)]


def _complete(operator: torch._ops.OpOverload, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with the defaults at the end, which PyTorch leaves out."""
    return (*inputs, *(x.default_value for x in operator._schema.arguments[len(inputs) :]))


def _ffn_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    arguments = _complete(ffn_forward, inputs)
    ctx.save_for_backward(*arguments[:_FFN_GRADIENTS])
    ctx.options = arguments[_FFN_GRADIENTS + 1 :]  # without the residual


def _ffn_kept_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = _complete(ffn_forward_kept, inputs)
    _out, up_product, gate_product = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(up_product, gate_product)
    gated = arguments[3] is not None
    ctx.save_for_backward(*arguments[:_FFN_GRADIENTS], up_product, gate_product if gated else None)
    ctx.options = arguments[_FFN_GRADIENTS + 1 :]


def _ffn_gradients(ctx: Any, gradient: Tensor | None, *_products: None) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad
    if gradient is None:  # nothing depends on the result
        return (None,) * len(asked)
    tensors = ctx.saved_tensors[:_FFN_GRADIENTS]
    products = ctx.saved_tensors[_FFN_GRADIENTS:] or (None, None)
    needed = [index < len(asked) and asked[index] for index in range(_FFN_GRADIENTS)]
    found = iter(call(ffn_backward, gradient, needed, *products, *tensors, None, *ctx.options))
    result: list[Tensor | None] = [next(found) if need else None for need in needed]
    residual = gradient if len(asked) > _FFN_GRADIENTS and asked[_FFN_GRADIENTS] else None
    return (*result, residual, None, None, None, None)[: len(asked)]


def _norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _epsilon, layer, kernel = _complete(norm_forward, inputs)
    _y, summed, rstd, mean = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, mean)
    ctx.save_for_backward(x if residual is None else summed, weight, bias, rstd, mean)
    ctx.layer, ctx.kernel, ctx.residual = layer, kernel, residual is not None


def _norm_gradients(
    ctx: Any, grad_y: Tensor | None, grad_sum: Tensor | None, *_statistics: None
) -> tuple[Tensor | None, ...]:
    x, weight, bias, rstd, mean = ctx.saved_tensors
    asked = ctx.needs_input_grad
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    if not ctx.residual:
        grad_sum = None
    needed = [asked[0] or asked[1], asked[2], asked[3]]
    found = iter(
        call(norm_backward, grad_y, grad_sum, x, weight, bias, rstd, mean, needed, ctx.layer, ctx.kernel)
    )
    dx, d_weight, d_bias = (next(found) if need else None for need in needed)
    result = (dx if asked[0] else None, dx if asked[1] else None, d_weight, d_bias, None, None, None)
    return result[: len(asked)]


def _rope_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _q, k, cos, sin, positions, interleaved, inverse, kernel = _complete(rope, inputs)
    if cos.requires_grad or sin.requires_grad:
        raise Unsupported("cos: no gradient is computed for angles; detach them")
    ctx.save_for_backward(cos, sin, positions)
    ctx.options = interleaved, not inverse, kernel
    ctx.with_key = k is not None


def _rope_gradients(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    cos, sin, positions = ctx.saved_tensors
    dq = gradients[0]
    dk = gradients[1] if ctx.with_key else None
    turned = call(rope, dq, dk, cos, sin, positions, *ctx.options)
    result = (turned[0], turned[1] if ctx.with_key else None)
    return (*result, *(None for _ in ctx.needs_input_grad[2:]))


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise Unsupported("this gradient cannot be differentiated again")


torch.library.register_autograd("tilewise::gemm", _gemm_gradients, setup_context=_gemm_context)
torch.library.register_autograd("tilewise::ffn_forward", _ffn_gradients, setup_context=_ffn_context)
torch.library.register_autograd("tilewise::ffn_forward_kept", _ffn_gradients, setup_context=_ffn_kept_context)
torch.library.register_autograd("tilewise::ffn_backward", _no_second_derivative)
torch.library.register_autograd("tilewise::norm_forward", _norm_gradients, setup_context=_norm_context)
torch.library.register_autograd("tilewise::norm_backward", _no_second_derivative)
torch.library.register_autograd("tilewise::rope", _rope_gradients, setup_context=_rope_context)


# The same gradients, recorded by other calls.

_Gradients = tuple[Callable[..., None], Callable[..., Any]]  # setup_context and backward


def _run(operator: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> Any:
    """Without a gradient. Several results are a tuple, which autograd.Function wants."""
    with torch._C._AutoDispatchBelowAutograd():
        out = operator._op(*arguments)
    return tuple(out) if isinstance(out, list) else out


def _eager_call(
    operator: torch._ops.OpOverload, setup_context: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            out = _run(operator, arguments)
            setup_context(ctx, arguments, out)
            return out

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            try:
                return gradients(ctx, *given)
            except RuntimeError as error:
                raise translated(error, {}, {}) from None

    Recorded.__name__ = operator.name()
    return Recorded.apply


def _transformed_call(
    operator: torch._ops.OpOverload, setup_context: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """As torch.func wants it."""

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return _run(operator, arguments)

        @staticmethod
        def jvp(ctx: Any, *_: Any) -> None:
            name = operator._schema.name.removeprefix("tilewise::")
            raise Unsupported(
                f"{name} has no forward-mode derivative: use grad, vjp or jacrev instead of jvp or jacfwd"
            )

        @staticmethod
        def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
            along = [dim if isinstance(dim, int) else None for dim in dims]  # a list of flags has a list
            results = [call(operator, *part) for part in slices(arguments, along, info.batch_size)]
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
            return stacked, (0,) * len(stacked)

    Transformed.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
    Transformed.backward = staticmethod(gradients)  # type: ignore[method-assign]
    Transformed.__name__ = operator.name()
    return Transformed.apply


def _rope_gradients_of(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    return _rope_gradients(ctx, list(given))


_FIRST: dict[torch._ops.OpOverload, _Gradients] = {
    gemm: (_gemm_context, _gemm_gradients),
    ffn_forward: (_ffn_context, _ffn_gradients),
    ffn_forward_kept: (_ffn_kept_context, _ffn_gradients),
    norm_forward: (_norm_context, _norm_gradients),
    rope: (_rope_context, _rope_gradients_of),
}
_LAST: _Gradients = (lambda *_: None, _no_second_derivative)

_EAGER = {operator: _eager_call(operator, *of) for operator, of in _FIRST.items()}
_TRANSFORMED = {
    operator: _transformed_call(operator, *of)
    for operator, of in {**_FIRST, ffn_backward: _LAST, norm_backward: _LAST}.items()
}
