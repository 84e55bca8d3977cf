"""examples/triangle_attention: the module by Tilewise beside the plain one, and what its script prints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import programs
import pytest
import torch
from conftest import assert_within_contract


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from programs.example(monkeypatch, "triangle_attention", "module", "compare")


@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_switched_module_has_the_results_of_the_plain_one(example: Any, starting: bool, batch: int) -> None:
    plain = example.module.TriangleAttention(16, 8, 2, starting)
    ours = torch.nn.Sequential(copy.deepcopy(plain))
    assert example.module.switch(ours) == 1
    entries = [example.compare.pairs(11, 16, torch.float32, torch.device("cpu")) for _ in range(batch)]
    x, mask = (torch.cat(parts) for parts in zip(*entries, strict=True))
    exact, _ = example.compare.run(copy.deepcopy(plain).double(), x.double(), mask.double())
    math, _ = example.compare.run(plain, x, mask)
    found, _ = example.compare.run(ours[0], x, mask)
    names = ["out", "x", *(name for name, _ in plain.named_parameters())]
    for name, *results in zip(names, found, exact, math, strict=True):
        assert_within_contract(name, *results)


def test_the_script_compares_the_two(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    errors = example.compare.main(["--length", "12", "--device", "cpu"])
    assert errors["tilewise"] <= 2 * errors["plain PyTorch"]
    said = capsys.readouterr().out
    assert said.startswith("2 modules switched") and "\nplain PyTorch" in said and "\ntilewise" in said
