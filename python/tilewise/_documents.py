"""Documents as packed sequences: attention under `masks.documents` without a block mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise._binding import DEFAULTS, INDEX

_ROWS = ("query", "key", "value")
_BLOCKS = [name for name in INDEX if name.startswith("block_")]


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin, and what `masks.documents` was asked besides."""

    starts: Tensor  # int32 [documents + 1]: those of the first batch entry, then those of the next, and so on
    entries: int
    length: int  # of an entry
    longest: int  # document
    causal: bool

    @staticmethod
    def of(entries: list[list[int]], causal: bool, device: torch.device | str) -> Documents:
        lengths = torch.tensor([0, *(length for entry in entries for length in entry)])
        starts = lengths.cumsum(0).to(torch.int32).to(device)
        return Documents(starts, len(entries), sum(entries[0]), int(lengths.max()), causal)

    def to(self, device: torch.device | str) -> Documents:
        return replace(self, starts=self.starts.to(device))

    def starts_of(self, batch: int) -> Tensor:
        """For so many entries; one may stand for all."""
        if batch == self.entries:
            return self.starts
        first = torch.arange(batch, device=self.starts.device, dtype=torch.int32) * self.length
        starts = (first[:, None] + self.starts[:-1]).flatten()
        return torch.cat([starts, first[-1:] + self.length])

    def fit(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, enable_gqa: bool) -> bool:
        """Whether these rows can be looked at as packed ones, and mean the same."""
        if not all(x.dim() == 4 for x in (query, key, value)):
            return False
        batch, heads = query.shape[:2]
        return (
            batch > 0
            and self.entries in (1, batch)
            and batch * self.length < 2**31
            and (enable_gqa or heads == key.shape[1])
            and (slopes is None or slopes.dim() == 1)
            and all(x.device == self.starts.device for x in (query, key, value))
            and all(x.shape[0] == batch and x.shape[2] == self.length for x in (query, key, value))
            and all(batch == 1 or x.stride(0) == self.length * x.stride(2) for x in (query, key, value))
        )


def as_packed(arguments: Sequence[Any], documents: Documents) -> tuple[Any, ...]:
    """attention_forward's arguments without the block mask, and with packed sequences in its place."""
    changed = list(arguments)
    batch = changed[INDEX["query"]].shape[0]
    for name in _ROWS:
        changed[INDEX[name]] = _tokens(changed[INDEX[name]])
    for name in _BLOCKS:
        changed[INDEX[name]] = DEFAULTS[INDEX[name]]
    starts = documents.starts_of(batch)
    for side in ("q", "k"):
        changed[INDEX[f"cumulative_{side}"]] = starts
        changed[INDEX[f"max_length_{side}"]] = documents.longest
    changed[INDEX["is_causal"]] = changed[INDEX["is_causal"]] or documents.causal
    return tuple(changed)


def _tokens(rows: Tensor) -> Tensor:
    """[B, H, S, D] as [B·S, H, D], a view."""
    batch, heads, length, dim = rows.shape
    if batch == 1:
        return rows[0].transpose(0, 1)
    return rows.transpose(1, 2).view(batch * length, heads, dim)


def from_packed(out: Tensor, lse: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """[B·S, H, Dv] and [H, B·S] as [B, H, S, Dv] and [B, H, S]."""
    return out.unflatten(0, (batch, -1)).transpose(1, 2), lse.unflatten(1, (batch, -1)).transpose(0, 1)
