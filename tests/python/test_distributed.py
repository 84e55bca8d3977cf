"""Attention over several processes against one. gloo stands in for NCCL; the code above it is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import distributed_cases as cases
import pytest
import torch
from ranks import Ranks

LONG = "TILEWISE_LONG_TESTS" in os.environ
SIZES = [2, 4, 3, 6] if LONG else [2, 4]
CASES = 200 if LONG else 30


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(request.param, str(tmp_path_factory.mktemp("store") / "store"))
    yield pool
    pool.close()


def _fails(found: list[str | None]) -> list[str]:
    return [text for text in found if text is not None]


def test_ranks_give_what_one_process_gives(ranks: Ranks) -> None:
    for seed in range(CASES):
        assert not _fails(ranks.run(cases.check_exact, seed, ranks.size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_are_within_the_contract(ranks: Ranks, dtype: torch.dtype) -> None:
    for seed in range(1000, 1000 + CASES // 3):
        assert not _fails(ranks.run(cases.check_contract, seed, ranks.size, dtype))
