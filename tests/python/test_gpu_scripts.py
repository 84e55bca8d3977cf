"""scripts/gpu_test.py and its records, as far as they need no GPU."""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tilewise.bench import driver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_test(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (ROOT / "scripts/gpu_test.py").exists():
        pytest.skip("a staged tree has no sources")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setitem(sys.modules, "gpu_driver", driver)  # its name in a staged tree
    for name in ("gpu_record", "gpu_sanitized", "gpu_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("gpu_test")


def names_of_cuda_tests() -> set[str]:
    names = set()
    for path in (ROOT / "tests/cuda").rglob("*_test.c*"):
        text = path.read_text()
        prefixes = dict(re.findall(r"INSTANTIATE_TEST_SUITE_P\((\w+),\s*(\w+)", text))
        of_suite = {suite: prefix for prefix, suite in prefixes.items()}
        for kind, suite, name in re.findall(r"^(TEST\w*)\((\w+), (\w+)\)", text, re.MULTILINE):
            names.add(f"{of_suite[suite]}/{suite}.{name}/" if kind == "TEST_P" else f"{suite}.{name}")
    return names


def test_sanitized_tests_are_there(gpu_test: Any) -> None:
    known = names_of_cuda_tests()
    for families in (gpu_test.SANITIZED_TESTS, gpu_test.RACECHECKED_TESTS):
        for pattern in (pattern for tests in families.values() for pattern in tests):
            parameter = re.fullmatch(r"(\w+/\w+\.\w+/)\w+", pattern)
            name = parameter[1] if parameter else pattern
            assert fnmatch.filter(known, name), pattern


def test_races_are_not_looked_for_where_copies_are_the_tensor_memory_units(gpu_test: Any) -> None:
    patterns = [pattern for tests in gpu_test.RACECHECKED_TESTS.values() for pattern in tests]
    assert not [pattern for pattern in patterns if re.search("wgmma|mmaf32|wide", pattern, re.IGNORECASE)]


def test_domains_have_their_counts(gpu_test: Any) -> None:
    counts = {suite: domain.problems(5000) for suite, domain in gpu_test.DOMAINS.items()}
    assert counts == {
        "property": 5000,
        "property wgmma": 6000,
        "property wgmma f32": 400,
        "property mma": 5000,
        "property mma f32": 500,
        "property plain": 1000,
    }


def test_what_kernels_took_is_read(gpu_test: Any) -> None:
    output = "40 problems from seed 1\nfused took 40 forward, 31 backward\nmma took 9 forward, 0 backward\n"
    assert gpu_test.taken_in(output) == {
        "fused": {"forward": 40, "backward": 31},
        "mma": {"forward": 9, "backward": 0},
    }


def test_a_record_ends_with_its_sums(gpu_test: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "SOURCES.sha256").write_text("sources")
    (tmp_path / "BUILD.json").write_text("{}")
    monkeypatch.setattr(gpu_test.gpu_record, "STAGE", tmp_path)
    path = tmp_path / "gpu/tests.jsonl"
    record = gpu_test.Record(path, None)
    for suite in ("a", "b"):
        record.add(gpu_test.Outcome(suite, passed=3, skipped=1).line())
    record.close(2, 7.5)
    record = gpu_test.Record(path, None, replacing={"b"})
    record.add(gpu_test.Outcome("b", passed=5, failed=1).line())
    record.close(1, 2.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("suite") for line in lines] == [None, "a", "b", None]
    assert lines[-1] == {
        "total": {"suites": 2, "passed": 8, "failed": 1, "skipped": 1},
        "run": {"suites": 1, "seconds": 2.0},
    }
