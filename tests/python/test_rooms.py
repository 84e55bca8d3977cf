"""The rooms of src/cuda: which architecture may include which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "src/cuda"
OPERATIONS = {"attention", "ffn", "gemm", "norm", "rope"}
SHARED = {"ptx", "runtime", "tile"}  # by all operations
ARCHITECTURES = ("sm80", "sm90")
# What is neither an architecture's nor common to several, by operation.
BESIDE = {"attention": {"simt", "common", "wide", "widened"}, "gemm": {"simt", "common", "cublaslt"}}


def architectures_of(path: str) -> set[str]:
    return set(path.split("/")) & set(ARCHITECTURES)


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    if not CUDA.exists():
        pytest.skip("a staged tree has no sources")
    return [path for path in CUDA.rglob("*") if path.is_file()]


def test_an_architecture_includes_no_other(sources: list[Path]) -> None:
    wrong = []
    for path in sources:
        name = path.relative_to(ROOT / "src").as_posix()
        own = architectures_of(name)
        chooses = path.name.startswith("kernel") and not own  # lists the kernels of all architectures
        if chooses:
            continue
        for included in re.findall(r'^#include "(cuda/[^"]+)"', path.read_text(), re.MULTILINE):
            others = architectures_of(included) - own
            if others:
                wrong.append(f"{name} includes {included}")
    assert wrong == []


def test_every_file_is_in_a_room(sources: list[Path]) -> None:
    wrong = []
    for path in sources:
        operation, *rest = path.relative_to(CUDA).parts
        rooms = {*ARCHITECTURES, *BESIDE.get(operation, {"simt", "common"})}
        known = operation in SHARED or (
            operation in OPERATIONS and (rest[0] in rooms or rest == ["kernels.cpp"])
        )
        if not known:
            wrong.append(path.relative_to(CUDA).as_posix())
    assert wrong == []
