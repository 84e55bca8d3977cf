"""Triangle attention as protein models have it, in plain PyTorch, and the same by Tilewise.

The parameters have the names that OpenFold and Boltz give them, so that their weights fit.
"""

from __future__ import annotations

import types
from typing import Any

import tilewise
import torch
from torch import Tensor, nn


class GatedAttention(nn.Module):
    """The projections around attention."""

    def __init__(self, dim: int, head_dim: int, heads: int) -> None:
        super().__init__()
        self.no_heads = heads
        self.linear_q = nn.Linear(dim, head_dim * heads, bias=False)
        self.linear_k = nn.Linear(dim, head_dim * heads, bias=False)
        self.linear_v = nn.Linear(dim, head_dim * heads, bias=False)
        self.linear_g = nn.Linear(dim, head_dim * heads)
        self.linear_o = nn.Linear(head_dim * heads, dim)


class TriangleAttention(nn.Module):
    """Attention along the rows of a pair representation ("starting node"), or along its columns ("ending").

    The bias comes from the pair representation itself: rows i of queries j and keys k add a term of (j, k).
    """

    def __init__(self, dim: int, head_dim: int, heads: int, starting: bool = True) -> None:
        super().__init__()
        self.starting = starting
        self.layer_norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, heads, bias=False)
        self.mha = GatedAttention(dim, head_dim, heads)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B, I, J, dim] and mask [B, I, J], 1 where a pair exists."""
        x, mask = (x, mask) if self.starting else (x.transpose(1, 2), mask.transpose(1, 2))
        x = self.layer_norm(x)
        out = gated(self.mha, x, plain_attention(*projected(self.mha, x), *terms(self, x, mask)))
        return out if self.starting else out.transpose(1, 2)


def projected(mha: Any, x: Tensor) -> tuple[Tensor, ...]:
    """query, key and value [B, I, H, J, D], as views of the projections."""
    layers = (mha.linear_q, mha.linear_k, mha.linear_v)
    return tuple(layer(x).unflatten(-1, (mha.no_heads, -1)).transpose(-3, -2) for layer in layers)


def terms(module: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The bias [B, 1, H, J, J], and the mask by row as bool [B, I, 1, 1, J]."""
    return module.linear(x).permute(0, 3, 1, 2).unsqueeze(1), mask[:, :, None, None].bool()


def gated(mha: Any, x: Tensor, out: Tensor) -> Tensor:
    """[B, I, J, dim] of heads [B, I, H, J, D]."""
    return mha.linear_o(torch.sigmoid(mha.linear_g(x)) * out.transpose(-3, -2).flatten(-2))


def plain_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """The scores of all rows are in memory: I·H·J² of them."""
    score = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    score = score + bias + torch.where(mask, 0.0, -1e9).to(score.dtype)
    return torch.softmax(score, -1) @ value


def tilewise_forward(self: Any, x: Tensor, mask: Tensor, *_: Any, **__: Any) -> Tensor:
    """TriangleAttention's forward. Sizes of chunks and names of kernels, which models pass, are unused."""
    x, mask = (x, mask) if self.starting else (x.transpose(1, 2), mask.transpose(1, 2))
    x = self.layer_norm(x)
    out = tilewise.triangle_attention(*projected(self.mha, x), *terms(self, x, mask))
    out = gated(self.mha, x, out)
    return out if self.starting else out.transpose(1, 2)


def switch(model: nn.Module) -> int:
    """Gives every triangle attention in a model the forward above, and says how many there were.

    It looks for the class's name, and so finds those of OpenFold and Boltz, too.
    """
    found = [module for module in model.modules() if type(module).__name__.startswith("TriangleAttention")]
    for module in found:
        module.forward = types.MethodType(tilewise_forward, module)
    return len(found)
