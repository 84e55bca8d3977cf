"""A Vision Transformer on tilewise.nn (Dosovitskiy et al., 2020: arXiv 2010.11929)."""

from __future__ import annotations

from dataclasses import dataclass

import tilewise
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    image_size: int
    patch_size: int
    channels: int
    classes: int
    dim: int
    depth: int
    heads: int

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1


class TorchAttention(tilewise.nn.Attention):
    """The same layer and the same weights, its attention by PyTorch's SDPA."""

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projections)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, attention: str) -> None:
        super().__init__()
        sdpa = attention == "sdpa"
        self.attention_norm = tilewise.nn.LayerNorm(dim)
        self.attention = (
            TorchAttention(dim, heads) if sdpa else tilewise.nn.Attention(dim, heads, kernel=attention)
        )
        self.ffn_norm = tilewise.nn.LayerNorm(dim)
        self.ffn = tilewise.nn.FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        # Adding outside keeps the sum in f32 under autocast.
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class ViT(nn.Module):
    """Images [B, channels, S, S] to logits [B, classes].

    `attention` is "sdpa", "auto" or the name of a Tilewise kernel; it changes no weight.
    """

    def __init__(self, config: ViTConfig, attention: str = "auto") -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patches = nn.Conv2d(config.channels, dim, config.patch_size, config.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.tokens, dim))
        self.blocks = nn.Sequential(*(Block(dim, config.heads, attention) for _ in range(config.depth)))
        self.norm = tilewise.nn.LayerNorm(dim)
        self.head = nn.Linear(dim, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))
