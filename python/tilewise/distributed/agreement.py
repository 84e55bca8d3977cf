"""All ranks look at what each of them was given before anything else is sent.

So a wrong argument on one rank is the same error on every rank, and nobody waits for a message that never
comes.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch.distributed as dist

from tilewise._errors import InvalidArgument, Unsupported, reject
from tilewise.distributed.messages import Mailbox

Said = TypeVar("Said")


@dataclass(frozen=True)
class Given:
    """What a call was given on one rank. All but the first four must be the same everywhere."""

    length_q: int
    length_k: int
    mask_rows: int
    seed: tuple[int, int] | None
    query: str  # shape without the length, type and device
    key: str
    value: str
    attn_mask: str
    block_mask: str
    layout: str
    method: str
    options: str


@dataclass(frozen=True)
class _Raised:
    text: str


def hear(boxes: Sequence[Mailbox], look: Callable[[], Said], exchange: bool) -> list[Said]:
    """What `look` gives on every rank, ranks of the last box next to each other. All raise what one raised.

    Without an exchange all are taken to say what this rank does.
    """
    if not exchange:
        return [look()] * math.prod(box.size for box in boxes)
    if importlib.util.find_spec("numpy") is None:  # torch's own words would be a failed message
        raise Unsupported(
            "distributed: torch.distributed needs NumPy, which is not installed: pip install numpy"
        )
    own: Said | _Raised
    failure: Exception | None = None
    try:
        own = look()
    except Exception as error:  # of any kind: the other ranks wait for a word
        own, failure = _Raised(f"{type(error).__name__}: {error}"), error
    everyone: list[Any] = [own]
    for box in reversed(boxes):
        lists: list[Any] = [None] * box.size
        with box.naming_failures():
            dist.all_gather_object(lists, everyone, group=box.group)
        everyone = [given for found in lists for given in found]
    if failure is not None and all(given == own for given in everyone):
        raise failure
    for rank, given in enumerate(everyone):
        if isinstance(given, _Raised):
            raise InvalidArgument(f"rank {rank} raised {given.text}") from failure
    return everyone


def agree(boxes: Sequence[Mailbox], look: Callable[[], Given], exchange: bool) -> list[Given]:
    """What every rank was given. Raises where it is not the same."""
    everyone = hear(boxes, look, exchange)
    for field in fields(Given):
        values = [getattr(given, field.name) for given in everyone]
        if field.name in ("length_q", "length_k", "mask_rows", "seed"):
            continue
        for rank, value in enumerate(values):
            if value != values[0]:
                reject(
                    field.name, f"the same on all ranks, {values[0]} as on rank 0", f"{value} on rank {rank}"
                )
    return everyone
