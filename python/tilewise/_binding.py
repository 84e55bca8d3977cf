"""The shared object, and the operators it brings under `torch.ops.tilewise`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


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
        f"_tilewise.so was not found in {', '.join(map(str, folders))}: build it with `pip install .`"
    )


def load_library() -> None:
    try:
        torch.ops.load_library(library_path())
    except OSError as error:
        # PyTorch as some systems package it has the version in the name of the file.
        if "libtorch.so: cannot open" not in f"{error} {error.__cause__}":
            raise
        raise ImportError(
            "this PyTorch has no file libtorch.so, which Tilewise needs. "
            "With Debian's python3-torch, install libtorch-dev as well; PyTorch from pip has the file."
        ) from error


load_library()

attention_forward = torch.ops.tilewise.attention_forward.default
attention_inference = torch.ops.tilewise.attention_inference.default
attention_inference_masked = torch.ops.tilewise.attention_inference.masked
attention_backward = torch.ops.tilewise.attention_backward.default
attention_training = torch.ops.tilewise.attention_training.default
attention_training_masked = torch.ops.tilewise.attention_training.masked
attention_training_backward = torch.ops.tilewise.attention_training_backward.default
explain_attention = torch.ops.tilewise.explain_attention.default
attention_kernels = torch.ops.tilewise.attention_kernels.default
cuda_code = torch.ops.tilewise.cuda_code.default
block_lists = torch.ops.tilewise.block_lists.default
document_slices = torch.ops.tilewise.document_slices.default
prefix_slices = torch.ops.tilewise.prefix_slices.default
shared_prompt_slices = torch.ops.tilewise.shared_prompt_slices.default
block_causal_slices = torch.ops.tilewise.block_causal_slices.default
neighbourhood_slices = torch.ops.tilewise.neighbourhood_slices.default
# The same two by the kernel in Triton, which is in Python (`_triton`).
LIBRARY = torch.library.Library("tilewise", "FRAGMENT")  # its registrations end with it
for _operator in (attention_forward, attention_backward):
    LIBRARY.define(str(_operator._schema).replace("tilewise::attention_", "triton_"))
triton_forward = torch.ops.tilewise.triton_forward.default
triton_backward = torch.ops.tilewise.triton_backward.default
simd_levels = torch.ops.tilewise.simd_levels.default
version = torch.ops.tilewise.version.default
tuning_begin = torch.ops.tilewise.tuning_begin.default
tuning_end = torch.ops.tilewise.tuning_end.default
use_tuning = torch.ops.tilewise.use_tuning.default
tuning_status = torch.ops.tilewise.tuning_status.default

# attention_forward's arguments. attention_backward and explain_attention have some of their own before them.
_ARGUMENTS = attention_forward._schema.arguments
INDEX = {argument.name: index for index, argument in enumerate(_ARGUMENTS)}
DEFAULTS = tuple(argument.default_value for argument in _ARGUMENTS)
# Those with a gradient, in the order of attention_backward's `needed`.
DIFFERENTIABLE = tuple(INDEX[name] for name in ("query", "key", "value", "attn_mask", "sinks", "logit_scale"))
BACKWARD_OWN = len(attention_backward._schema.arguments) - len(_ARGUMENTS)


def complete(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with the defaults at the end, which PyTorch leaves out."""
    return (*arguments, *DEFAULTS[len(arguments) :])
