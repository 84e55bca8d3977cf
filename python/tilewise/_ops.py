"""The operators under `torch.ops.tilewise`: where they come from, and what PyTorch wants to know of them.

Kernels and schemas are in C++. Here are the shapes of results without data, gradients, autocast and vmap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise._errors import Unsupported, reject

Forward = Callable[[tuple[Any, ...]], tuple[Tensor, Tensor]]
Backward = Callable[[tuple[Any, ...]], Sequence[Tensor]]


def library_path() -> Path:
    """The shared object: what TILEWISE_TORCH_LIBRARY names, or the one beside this file.

    In an editable install Python files and the shared object are in two folders of the same package.
    """
    if given := os.environ.get("TILEWISE_TORCH_LIBRARY"):
        return Path(given)
    import tilewise

    folders = [Path(folder) for folder in tilewise.__path__]
    for folder in folders:
        if (path := folder / "_tilewise.so").exists():
            return path
    raise ImportError(
        f"_tilewise.so is in none of {', '.join(map(str, folders))}: build it with `pip install .`"
    )


torch.ops.load_library(library_path())

attention_forward = torch.ops.tilewise.attention_forward.default
attention_inference = torch.ops.tilewise.attention_inference.default
attention_inference_masked = torch.ops.tilewise.attention_inference.masked
attention_backward = torch.ops.tilewise.attention_backward.default
attention_training = torch.ops.tilewise.attention_training.default
attention_training_masked = torch.ops.tilewise.attention_training.masked
attention_training_backward = torch.ops.tilewise.attention_training_backward.default
explain_attention = torch.ops.tilewise.explain_attention.default
attention_kernels = torch.ops.tilewise.attention_kernels.default
simd_levels = torch.ops.tilewise.simd_levels.default
version = torch.ops.tilewise.version.default

# attention_forward's arguments. attention_backward and explain_attention have some of their own before them.
_ARGUMENTS = attention_forward._schema.arguments
_INDEX = {argument.name: index for index, argument in enumerate(_ARGUMENTS)}
_DEFAULTS = tuple(argument.default_value for argument in _ARGUMENTS)
# Those with a gradient, in the order of attention_backward's `needed`.
_DIFFERENTIABLE = tuple(_INDEX[name] for name in ("query", "key", "value", "attn_mask", "sinks"))
_BACKWARD_OWN = len(attention_backward._schema.arguments) - len(_ARGUMENTS)


def _complete(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with the defaults at the end, which PyTorch leaves out."""
    return (*arguments, *_DEFAULTS[len(arguments) :])


# Shapes


def _empty_beside(like: Tensor, last_extent: int) -> Tensor:
    """What the binding allocates: heads outside positions in memory or inside, as in `like`."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to load, so only to trace

    if like.dim() == 4 and guard_or_false(like.stride(1) < like.stride(2)):
        batch, heads, length = like.shape[:3]
        return like.new_empty((batch, length, heads, last_extent)).transpose(1, 2)
    return like.new_empty((*like.shape[:-1], last_extent))


def _check_one_device(arguments: Sequence[Any]) -> None:
    device = arguments[0].device
    for name, value in zip(_INDEX, arguments, strict=False):
        if isinstance(value, Tensor) and value.device != device and name != "dropout_seed":
            reject(name, f"memory on {device}", value.device)


def _empty_outputs(query: Tensor, value: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    statistics = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (query.shape[1], query.shape[0]) if packed else query.shape[:-1]
    return _empty_beside(query, value.shape[-1]), query.new_empty(rows, dtype=statistics)


def _empty_gradients(tensors: Sequence[Any], needed: Sequence[bool]) -> list[Tensor]:
    """Gradients of the differentiable arguments, of which the last may be left out."""
    asked = [(index, x) for index, (x, need) in enumerate(zip(tensors, needed, strict=False)) if need]
    return [_empty_beside(x, x.shape[-1]) if index < 3 else x.new_empty(x.shape) for index, x in asked]


@torch.library.register_fake("tilewise::attention_forward")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    arguments = _complete(arguments)
    _check_one_device(arguments)
    return _empty_outputs(arguments[0], arguments[2], packed=arguments[_INDEX["cumulative_q"]] is not None)


@torch.library.register_fake("tilewise::attention_inference")
@torch.library.register_fake("tilewise::attention_inference.masked")
def _(query: Tensor, key: Tensor, value: Tensor, options: Tensor, mask: Tensor | None = None) -> Tensor:
    _check_one_device((query, key, value, mask))
    return _empty_beside(query, value.shape[-1])


@torch.library.register_fake("tilewise::attention_training")
@torch.library.register_fake("tilewise::attention_training.masked")
def _(
    query: Tensor, key: Tensor, value: Tensor, options: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check_one_device((query, key, value, mask))
    return _empty_outputs(query, value, packed=False)


@torch.library.register_fake("tilewise::attention_backward")
def _(*arguments: Any) -> list[Tensor]:
    needed = arguments[_BACKWARD_OWN - 1]
    arguments = _complete(arguments[_BACKWARD_OWN:])
    return _empty_gradients([arguments[index] for index in _DIFFERENTIABLE], needed)


@torch.library.register_fake("tilewise::attention_training_backward")
def _(*arguments: Any) -> list[Tensor]:
    needed, query, key, value, _, mask, _ = arguments[_BACKWARD_OWN - 1 :]
    return _empty_gradients((query, key, value, mask), needed)


@torch.library.register_fake("tilewise::explain_attention")
def _(*_: Any) -> str:
    raise Unsupported("explain looks at strides and memory: it takes no meta or fake tensors")


# Gradients


def _save(ctx: Any, arguments: Sequence[Any], out: Tensor, lse: Tensor) -> None:
    slopes = arguments[_INDEX["alibi_slopes"]]
    if slopes is not None and slopes.requires_grad:
        raise Unsupported("alibi_slopes: no gradient is computed for them; detach them")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, *(arguments[index] for index in _DIFFERENTIABLE))
    ctx.arguments = list(arguments)
    for index in _DIFFERENTIABLE:
        ctx.arguments[index] = None


def _gradients(
    ctx: Any, needed: list[bool], grad_out: Tensor | None, grad_lse: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the differentiable arguments, None for those not needed."""
    out, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for index, tensor in zip(_DIFFERENTIABLE, tensors, strict=True):
        arguments[index] = tensor
    arguments[_INDEX["deterministic"]] |= torch.are_deterministic_algorithms_enabled()
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    computed = iter(backward((grad_out, grad_lse, out, lse, needed, *arguments)))
    return [next(computed) if need else None for need in needed]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs, *output)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    asked = ctx.needs_input_grad  # shorter than the arguments, where defaults were left out
    needed = [index < len(asked) and asked[index] for index in _DIFFERENTIABLE]
    result: list[Tensor | None] = [None] * len(asked)
    for index, gradient in zip(_DIFFERENTIABLE, _gradients(ctx, needed, grad_out, grad_lse), strict=True):
        if gradient is not None:
            result[index] = gradient
    return tuple(result)


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise Unsupported("attention has no second derivative: its gradient cannot be differentiated again")


def _no_forward_derivative(ctx: Any, *_: Any) -> None:
    raise Unsupported("attention has no forward-mode derivative: take grad, vjp or jacrev for jvp or jacfwd")


torch.library.register_autograd("tilewise::attention_forward", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("tilewise::attention_backward", _no_second_derivative)


# Calls. What register_autograd makes of an operator serves tracing and direct use. It takes every argument
# through Python more than once, many times the cost of a small attention, and does not know torch.func; so
# eager calls go round it.


def eager() -> bool:
    """Whether a call is not being traced, transformed or differentiated forward."""
    return not (torch.compiler.is_compiling() or _transformed())


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _below_autograd(operator: torch._ops.OpOverload, arguments: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator._op(*arguments)


def forward(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """attention_forward, by the shortest way that is right."""
    if torch.compiler.is_compiling():
        return attention_forward(*arguments)
    if _transformed():
        return _TransformedForward.apply(*autocast(arguments))
    if torch.is_grad_enabled():
        differentiable = [arguments[index] for index in _DIFFERENTIABLE]
        if any(
            x is not None and x.requires_grad for x in (*differentiable, arguments[_INDEX["alibi_slopes"]])
        ):
            arguments = autocast(arguments)  # a gradient belongs to what was cast, so before it is recorded
            return _EagerForward.apply(*(arguments[index] for index in _DIFFERENTIABLE), arguments)
    return _below_autograd(attention_forward, arguments)


def backward(arguments: tuple[Any, ...]) -> Sequence[Tensor]:
    """attention_backward, likewise."""
    if torch.compiler.is_compiling():
        return attention_backward(*arguments)
    if _transformed() or torch.is_grad_enabled():
        return _TransformedBackward.apply(*arguments)
    return _below_autograd(attention_backward, arguments)


class _EagerForward(torch.autograd.Function):
    """attention_forward of the last input. Before it come those of its arguments that have a gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        arguments = inputs[-1]
        out, lse = _below_autograd(attention_forward, arguments)
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
        if type(options) is not Tensor or torch._C._is_tracing():  # fake or part of a trace: not to be kept
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
                arguments = (given.get(name, _DEFAULTS[index]) for name, index in _INDEX.items())
                all_needed = needed + [False] * (len(_DIFFERENTIABLE) - len(needed))
                computed = iter(backward((*own, all_needed, *arguments)))
            else:
                rows = (query, key, value, options, mask)
                computed = iter(_attention_training_backward(*own, needed, *rows, deterministic))
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
        return _below_autograd(attention_forward, arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_no_forward_derivative)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _vmap_forward(forward, info.batch_size, dims, arguments)


class _TransformedBackward(torch.autograd.Function):
    """attention_backward, as torch.func wants it and where its own gradient might be asked for."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(attention_backward, arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_derivative)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        gradients, gradient_dims = _vmap_backward(backward, info.batch_size, dims, arguments)
        return tuple(gradients), tuple(gradient_dims)


def explain(arguments: tuple[Any, ...]) -> str:
    """explain_attention of the forward pass, and of the backward pass where a gradient would be recorded."""
    if torch.compiler.is_compiling():  # a graph has no place for text; without fullgraph it is broken here
        raise Unsupported("explain gives text, which cannot be compiled: call it outside the graph")
    tensors = [arguments[index] for index in _DIFFERENTIABLE]
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    text = explain_attention([], *arguments)
    if any(needed):
        text += explain_attention(needed, *arguments)
    return text.rstrip()


def named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """attention_forward's arguments by their names."""
    return dict(zip(_INDEX, arguments, strict=True))


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


def autocast(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    device_type = arguments[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return arguments
    return *_cast_rows(torch.get_autocast_dtype(device_type), *arguments[:4]), *arguments[4:]


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

    _LIBRARY.impl(operator.name().removeprefix("tilewise::"), kernel, key)


_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")  # its registrations end with it
for _key in ("AutogradCPU", "AutogradCUDA"):  # the gradient is recorded round them, in _Training
    for _name in ("attention_training", "attention_training.masked", "attention_training_backward"):
        _LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)
for _operator in (attention_forward, attention_inference, attention_inference_masked):
    _register_autocast(_operator, "cpu", "AutocastCPU")
    _register_autocast(_operator, "cuda", "AutocastCUDA")


# vmap: the new dimension is folded into the batch where that is the same thing, and walked along where not.


def _slices(arguments: Sequence[Any], dims: Sequence[int | None], size: int) -> list[tuple[Any, ...]]:
    def at(value: Any, dim: int | None, index: int) -> Any:
        return value if dim is None else value.select(dim, index)

    return [tuple(at(v, d, n) for v, d in zip(arguments, dims, strict=True)) for n in range(size)]


def _fold(tensor: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """[B, ...] with `size` along `dim` as [size·B, ...]; an extent of 1 in B is expanded."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    return tensor.expand(size, batch, *tensor.shape[2:]).flatten(0, 1)


def _fold_mask(mask: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    if mask is None:
        return None
    if dim is None and (mask.dim() < 4 or mask.shape[0] == 1):
        return mask  # broadcasts over the batch, however large
    if dim is not None:
        mask, dim = mask.movedim(dim, 0), 0
    rank = 4 if dim is None else 5
    while mask.dim() < rank:
        mask = mask.unsqueeze(rank - 4)
    return _fold(mask, dim, size, batch)


# What folding knows how to treat; a vmap over anything else, or one where the batch matters, is walked along.
_FOLDABLE = {_INDEX[name] for name in ("query", "key", "value", "attn_mask")}
_BATCH_MATTERS = [
    _INDEX[name]
    for name in ("dropout_seed", "alibi_slopes", "key_lengths", "page_table", "cumulative_q", "block_counts")
]


def _folds(arguments: Sequence[Any], dims: Sequence[int | None]) -> bool:
    batched = {index for index, dim in enumerate(dims) if dim is not None}
    return batched <= _FOLDABLE and all(arguments[index] is None for index in _BATCH_MATTERS)


def _fold_arguments(arguments: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    query, dim = arguments[0], dims[0]
    batch = query.shape[0] if dim is None else query.movedim(dim, 0).shape[1]
    rows = [_fold(x, d, size, batch) for x, d in zip(arguments[:3], dims[:3], strict=True)]
    return [*rows, _fold_mask(arguments[3], dims[3], size, batch), *arguments[4:]]


def _complete_dims(dims: Sequence[Any]) -> tuple[Any, ...]:
    return (*dims, *(None for _ in _DEFAULTS[len(dims) :]))


def _vmap_forward(
    call: Forward, size: int, dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    if _folds(arguments, dims):
        out, lse = call(tuple(_fold_arguments(arguments, dims, size)))
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)
    results = [call(slice) for slice in _slices(arguments, dims, size)]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)


def _vmap_backward(
    call: Backward, size: int, dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    own, own_dims = arguments[:_BACKWARD_OWN], (*dims[: _BACKWARD_OWN - 1], None)
    rest, rest_dims = arguments[_BACKWARD_OWN:], dims[_BACKWARD_OWN:]
    sums_over_batch = any(own[-1][3:])  # the gradients of mask and sinks
    if _folds(rest, rest_dims) and not sums_over_batch:
        rest = _fold_arguments(rest, rest_dims, size)
        batch = rest[0].shape[0] // size
        own = (*(_fold(x, d, size, batch) for x, d in zip(own[:-1], own_dims[:-1], strict=True)), own[-1])
        gradients = [x.unflatten(0, (size, -1)) for x in call((*own, *rest))]
    else:
        slices = _slices((*own, *rest), (*own_dims, *rest_dims), size)
        parts = zip(*(call(slice) for slice in slices), strict=True)
        gradients = [torch.stack(part) for part in parts]
    return gradients, [0] * len(gradients)


@torch.library.register_vmap("tilewise::attention_forward")
def _(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
    dims, arguments = _complete_dims(dims), _complete(arguments)
    return _vmap_forward(lambda a: attention_forward(*a), info.batch_size, dims, arguments)


@torch.library.register_vmap("tilewise::attention_backward")
def _(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
    own = arguments[:_BACKWARD_OWN]
    dims = (*dims[:_BACKWARD_OWN], *_complete_dims(dims[_BACKWARD_OWN:]))
    arguments = (*own, *_complete(arguments[_BACKWARD_OWN:]))
    return _vmap_backward(lambda a: attention_backward(*a), info.batch_size, dims, arguments)
