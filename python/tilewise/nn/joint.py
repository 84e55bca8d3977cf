"""Projections of the same rows side by side in memory, so that one product makes them all."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def lay_together(*layers: nn.Linear) -> None:
    """Moves the weights of layers into one piece of memory, in order, and their biases into another.

    They stay parameters of their own. Layers that differ in width or in having a bias are left alone.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        if any(x is None for x in parameters):
            continue
        if len({(x.shape[1:], x.dtype, x.device) for x in parameters}) > 1:
            continue
        whole = torch.cat([x.detach() for x in parameters])
        for parameter, part in zip(parameters, whole.split([len(x) for x in parameters]), strict=True):
            parameter.data = part


def joint(*tensors: Tensor) -> Tensor | None:
    """One view of tensors that lie together in memory, along their first dimension; else None.

    >>> a, b = torch.arange(6).view(3, 2).split([1, 2])
    >>> joint(a, b)
    tensor([[0, 1],
            [2, 3],
            [4, 5]])
    >>> joint(b, a) is None
    True
    """
    first = tensors[0]
    end = first.data_ptr()
    for x in tensors:
        if x.data_ptr() != end or not x.is_contiguous() or x.shape[1:] != first.shape[1:]:
            return None
        end += x.nbytes
    storage = first.untyped_storage()
    if any(x.dtype != first.dtype for x in tensors) or end > storage.data_ptr() + storage.nbytes():
        return None
    rows = sum(len(x) for x in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
