"""A whole transformer layer of a known model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewise import nn
from tilewise.bench.implementations import CannotTake
from tilewise.bench.operations import plain
from tilewise.bench.operations.operation import KEPT, PRODUCTS, Maker, Operation
from tilewise.bench.problem import ITEM_BYTES, BadInput

_LLAMA = nn.CONFIGS["llama-2-7b"]
_SMALL = replace(_LLAMA, embed_dim=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn_dim=2752)
MODELS = {**nn.CONFIGS, "llama-small": _SMALL}  # which a CPU can bear
ATTENTION = {"forward": 1, "backward": 2.5, "both": 3.5}  # that a pass makes of attention's products


def elements(config: nn.LayerConfig) -> int:
    """Of the matrices of a layer."""
    projections = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.embed_dim * (projections + (3 if config.gated else 2) * config.ffn_dim)


def random_layer(config: nn.LayerConfig, make: Maker) -> nn.TransformerLayer:
    return nn.TransformerLayer(config, device=make.device, dtype=make.dtype).requires_grad_(False)


@dataclass(frozen=True)
class Layer(Operation):
    model: str = "vit-b/16"
    batch: int = 1
    tokens: int = 1

    op = "layer"
    choices = {"model": tuple(MODELS)}  # noqa: RUF012
    defaults = {"batch": 1}  # noqa: RUF012

    def __post_init__(self) -> None:
        most = self.config.max_positions
        if most and self.tokens > most:
            raise BadInput(f"tokens: expected at most {self.model}'s {most}, got {self.tokens}")

    @property
    def config(self) -> nn.LayerConfig:
        return MODELS[self.model]

    @property
    def flops(self) -> float:
        """Of the products and of attention, half of it when causal."""
        config = self.config
        products = 2.0 * self.batch * self.tokens * elements(config) * PRODUCTS[self.direction]
        pairs = self.batch * self.tokens**2 / (2 if config.is_causal else 1)
        return products + 4.0 * config.num_heads * config.head_dim * pairs * ATTENTION[self.direction]

    @property
    def bytes(self) -> float:
        """Matrices, x and the result; what lies between need not leave the chip."""
        weights, rows = elements(self.config), self.batch * self.tokens * self.config.embed_dim
        forward, backward = weights + 2 * rows, 2 * weights + 3 * rows
        moved = {"forward": forward, "backward": backward, "both": forward + backward}[self.direction]
        return ITEM_BYTES[self.dtype] * moved

    def values(self, make: Maker) -> tuple[Any, ...]:
        x = make.normal(self.batch, self.tokens, self.config.embed_dim)
        return x, random_layer(self.config, make)

    def ours(self, kernel: str, *values: Any) -> Any:
        x, layer = values
        if kernel == KEPT and self.direction == "forward":
            raise CannotTake("products are kept only for a backward pass")
        layer.ffn.keep_products = kernel == KEPT
        return layer(x)

    @classmethod
    def kernels(cls, device: torch.device) -> list[str]:
        return [*super().kernels(device), KEPT]

    def theirs(self, *values: Any) -> Any:
        x, layer = values
        return plain.forward(layer, x)
