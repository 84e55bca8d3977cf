"""Attention over sequences that several ranks hold together, on torch.distributed."""

from tilewise.distributed import strategies
from tilewise.distributed.attention import attention, attention_varlen
from tilewise.distributed.layout import (
    Layout,
    Span,
    balanced,
    contiguous,
    count_pairs,
    documents,
    striped,
    zigzag,
)
from tilewise.distributed.sharding import shard, unshard

__all__ = [
    "Layout",
    "Span",
    "attention",
    "attention_varlen",
    "balanced",
    "contiguous",
    "count_pairs",
    "documents",
    "shard",
    "strategies",
    "striped",
    "unshard",
    "zigzag",
]
