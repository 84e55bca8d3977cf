"""A layer on one new token of each sequence, against a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise import nn
from tilewise.bench.operations import plain
from tilewise.bench.operations.layer import MODELS, elements, random_layer
from tilewise.bench.operations.operation import Maker, Operation
from tilewise.bench.problem import ITEM_BYTES, BadInput


@dataclass(frozen=True)
class DecodeStep(Operation):
    model: str = "llama-2-7b"
    batch: int = 1
    context: int = 1  # tokens in the cache after the step

    op = "decode-step"
    passes = ("forward",)
    choices = {"model": tuple(name for name, config in MODELS.items() if config.is_causal)}  # noqa: RUF012
    defaults = {"batch": 1}  # noqa: RUF012

    def __post_init__(self) -> None:
        most = self.config.max_positions
        if most and self.context > most:
            raise BadInput(f"context: expected at most {self.model}'s {most}, got {self.context}")

    @property
    def config(self) -> nn.LayerConfig:
        return MODELS[self.model]

    @property
    def flops(self) -> float:
        config = self.config
        attention = 4.0 * self.batch * config.num_heads * config.head_dim * self.context
        return 2.0 * self.batch * elements(config) + attention

    @property
    def bytes(self) -> float:
        """Matrices, and the keys and values there are."""
        config = self.config
        cache = 2 * self.batch * config.num_kv_heads * self.context * config.head_dim
        return float(ITEM_BYTES[self.dtype] * (elements(config) + cache))

    def values(self, make: Maker) -> tuple[Any, ...]:
        config = self.config
        k, v = (make.normal(self.batch, config.num_kv_heads, self.context, config.head_dim) for _ in range(2))
        lengths = torch.full((self.batch,), self.context - 1, dtype=torch.int32, device=make.device)
        x = make.normal(self.batch, 1, config.embed_dim)
        return x, random_layer(config, make), nn.KVCache(k, v, lengths)

    def ours(self, kernel: str, *values: Any) -> Any:
        x, layer, cache = values
        out = layer(x, cache=cache)
        cache.lengths -= 1  # the same step again
        return out

    def theirs(self, *values: Any) -> Any:
        x, layer, cache = values
        return plain.forward(layer, x, cache)
