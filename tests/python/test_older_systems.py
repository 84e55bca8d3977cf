"""A wheel runs on systems as old as its name says: bindings/torch/older_systems.cpp has what they lack."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tilewise import _binding

SOURCE = Path(__file__).resolve().parents[2] / "bindings" / "torch" / "older_systems.cpp"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}  # those of manylinux_2_28
SYMBOL = re.compile(r"\*UND\*\s+\w+\s+\(?(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\)?\s+(\S+)$", re.MULTILINE)
TOOLS = ("g++", "objdump", "nm")


def said_by(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def newer_symbols(library: Path) -> set[str]:
    """What a library takes from the system in a version that older systems do not have."""
    found = SYMBOL.findall(said_by("objdump", "-T", str(library)))
    assert found, "objdump names no symbol with a version"
    return {
        name
        for family, version, name in found
        if tuple(int(number) for number in version.split(".")) > NEWEST[family]
    }


@pytest.mark.skipif(not SOURCE.exists(), reason="no sources beside the tests")
@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="wheels are for x86-64 Linux"
)
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
def test_every_symbol_that_older_systems_lack_has_a_stand_in(tmp_path: Path) -> None:
    stand_ins = tmp_path / "older_systems.o"
    has_cuda = ("-DTILEWISE_HAS_CUDA",) if _binding.cuda_code() else ()  # as the library was built
    options = ("-std=c++20", "-O2", "-fPIC", *has_cuda)
    said_by("g++", *options, "-c", str(SOURCE), "-o", str(stand_ins))
    defined = {line.split()[-1] for line in said_by("nm", "--defined-only", str(stand_ins)).splitlines()}
    assert newer_symbols(Path(_binding.library_path())) <= defined
