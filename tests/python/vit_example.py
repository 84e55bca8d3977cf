"""The ViT example's modules and a small set of images, for its tests."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import example
from torch import Tensor

MODULES = ("model", "data", "weights", "train", "infer", "record", "scaling")
SMALL = ["--patch", "7", "--dim", "48", "--depth", "2", "--heads", "3", "--device", "cpu"]


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from example(monkeypatch, "vit", *MODULES)


def images(count: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Images that can be told apart: a pattern of 4 x 4 for each class, under noise."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.rand(classes, 4, 4, generator=generator).round()
    patterns = patterns.repeat_interleave(7, 1).repeat_interleave(7, 2)
    labels = torch.randint(classes, (count,))
    pixels = (160 * patterns[labels] + 95 * torch.rand(count, 28, 28)).to(torch.uint8)
    return pixels, labels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small set in Fashion-MNIST's files."""
    for part, count in (("train", 640), ("t10k", 200)):
        pixels, labels = images(count)
        for kind, magic, shape, content in (
            ("images-idx3", 3, (count, 28, 28), pixels),
            ("labels-idx1", 1, (count,), labels.to(torch.uint8)),
        ):
            header = bytes((0, 0, 8, magic)) + b"".join(n.to_bytes(4, "big") for n in shape)
            path = tmp_path / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + bytes(content.flatten().tolist())))
    return tmp_path
