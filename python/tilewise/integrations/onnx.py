"""Exports models that use Tilewise to ONNX, where attention becomes the `Attention` operator of opset 23.

    from tilewise.integrations import onnx

    onnx.export(model, (x,), "model.onnx")

or, with options of one's own, `torch.onnx.export(..., dynamo=True, opset_version=23,
custom_translation_table=onnx.translation_table())`.

What the operator expresses: masks, top-left causality, scale, softcap, shared heads, Dv ≠ D. What it does not
(sinks, logit_scale, ALiBi, windows, block masks, packed or cached sequences, dropout, bottom-right alignment,
lse) raises `tilewise.Unsupported`. A query that sees no key gives zeros in ONNX too, but runtimes were not
always sure of it.

Needs the packages onnx and onnxscript.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from tilewise._binding import attention_forward
from tilewise._errors import Unsupported, reject
from tilewise._scalars import whole_of

__all__ = ["export", "translation_table"]

_OPSET = 23

# What the operator has no word for: the argument of tilewise::attention_forward, and what to say of it.
_WITHOUT_A_WORD = {
    "cumulative_q": "cu_seqlens_q: ONNX's Attention has no packed sequences; pad them and pass a mask",
    "page_table": "page_table: ONNX's Attention has none",
    "key_lengths": "cache_seqlens: ONNX's Attention has none in opset 23; pass an attn_mask",
    "block_counts": "block_mask: ONNX's Attention has none; pass BlockMask.to_dense as attn_mask",
    "dropout_seed": "dropout_p: ONNX's Attention has no dropout; export the model in evaluation",
    "bottom_right": "alignment: ONNX's Attention counts positions from the top left",
    "window_left": "window: ONNX's Attention has none in opset 23",
    "window_right": "window: ONNX's Attention has none in opset 23",
    "alibi_slopes": "alibi_slopes: ONNX's Attention has none; pass them as an additive attn_mask",
    "sinks": "sinks: ONNX's Attention has none",
    "logit_scale": "logit_scale: ONNX's Attention has none; multiply query by it",
}


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    path: str | PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opset_version: int = _OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Exports `model`, called with `args` and `kwargs`, and saves it at `path` if one is given.

    Args:
        model: in evaluation, or a program torch.export made of it.
        dynamic_shapes: those of torch.export.
        opset_version: at least 23.
        options: others of torch.onnx.export.

    Returns:
        what torch.onnx.export returns.

    >>> import tilewise
    >>> layer = tilewise.nn.Attention(32, 4, is_causal=True).eval()
    >>> program = export(layer, (torch.randn(2, 10, 32),), verbose=False)
    >>> [node.op_type for node in program.model.graph if node.op_type == "Attention"]
    ['Attention']
    """
    if whole_of("opset_version", opset_version) < _OPSET:
        reject("opset_version", f"at least {_OPSET}, the first with Attention", opset_version)
    if isinstance(model, torch.export.ExportedProgram):
        program = model
    else:
        with torch.no_grad():
            program = torch.export.export(model, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    _check(program)
    exported = torch.onnx.export(
        program,
        f=path,
        dynamo=True,
        opset_version=opset_version,
        input_names=input_names,
        output_names=output_names,
        custom_translation_table=translation_table() | options.pop("custom_translation_table", {}),
        **options,
    )
    assert exported is not None  # dynamo's is always a program
    return exported


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What torch.onnx.export takes as `custom_translation_table`."""
    from onnxscript import opset23

    def attend(arguments: Mapping[str, Any]) -> Any:
        if reason := _why_not(arguments):
            raise Unsupported(reason)
        named: dict[str, Any] = {"is_causal": int(arguments["is_causal"])}
        named["softcap"] = float(arguments.get("softcap", 0.0))
        if arguments["scale"] is not None:
            named["scale"] = float(arguments["scale"])
        query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
        # Runtimes broadcast over batch and heads alone.
        if mask is not None and not _covers(mask, query, key):
            lengths = [opset23.Shape(x, start=2, end=3) for x in (query, key)]
            mask = opset23.Expand(mask, opset23.Concat(*lengths, axis=0))
        out, *_ = opset23.Attention(query, key, value, mask, **named)
        return out

    def forward(*given: Any, **options: Any) -> Any:
        # The operator has no output for lse; `export` has made sure that nothing reads it.
        out = attend(_named(given, options))
        return out, opset23.Constant(value_float=float("nan"))

    return {attention_forward: forward}


def _named(given: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = attention_forward._schema.arguments
    named = {argument.name: argument.default_value for argument in arguments}
    return named | {argument.name: x for argument, x in zip(arguments, given, strict=False)} | dict(options)


def _covers(mask: Any, query: Any, key: Any) -> bool:
    """Whether a mask's last two extents are known to be those of the score."""
    shapes = [x.shape for x in (mask, query, key)]
    if any(shape is None for shape in shapes) or len(shapes[0]) < 2:
        return False
    return tuple(shapes[0])[-2:] == (shapes[1][2], shapes[2][2])


def _why_not(arguments: Mapping[str, Any]) -> str | None:
    """What of a call ONNX's operator does not express, or None."""
    for name, reason in _WITHOUT_A_WORD.items():
        if arguments.get(name) not in (None, False):
            return reason
    return None


def _check(program: torch.export.ExportedProgram) -> None:
    """Raises where a call in the program has no counterpart in ONNX."""
    for node in program.graph.nodes:
        if node.target is not attention_forward:
            continue
        if reason := _why_not(_named(node.args, node.kwargs)):
            raise Unsupported(reason)
        if any(user.args[1:] == (1,) and user.users for user in node.users):
            raise Unsupported("return_lse: ONNX's Attention has no such output")
