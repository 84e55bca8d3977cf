"""scripts/results_status.py: which records are of the sources as they are."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def results_status(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (ROOT / "scripts/results_status.py").exists():
        pytest.skip("a staged tree has no sources")
    if not shutil.which("git"):
        pytest.skip("no git")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "results_status", raising=False)
    return importlib.import_module("results_status")


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def commit(root: Path) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    subprocess.run(["git", *name, "commit", "-qm", "some"], cwd=root, check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Norms that include a header, whose functions are defined beside it; and attention, apart from them."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    write(tmp_path, "src/cuda/norm/norm.cu", '#include "cuda/tile/team.h"\n')
    write(tmp_path, "src/cuda/tile/team.h", '#include "tilewise/error.h"\n')
    write(tmp_path, "src/cuda/tile/team.cu", '#include "cuda/tile/team.h"\n')
    write(tmp_path, "include/tilewise/error.h", "\n")
    for name in ("src/cuda/mma/mma.cu", "src/attention/call.h", "src/core/arena.h"):
        write(tmp_path, name, "\n")
    commit(tmp_path)
    return tmp_path


def says(
    results_status: Any,
    root: Path,
    suite: str,
    sources: str | None,
    tests: str | None = None,
    failed: int = 0,
) -> str:
    record = root / f"{suite}.jsonl"
    environment = {"sources": sources, "tests": tests, "date": "a day"}
    last = {"total": {"passed": 3, "failed": failed}}
    record.write_text(json.dumps({"environment": environment}) + "\n" + json.dumps(last) + "\n")
    results_status.sources_of_fingerprint.cache_clear()
    return str(results_status.status(record, results_status.sources_of(root), root))


def test_a_record_is_current_until_a_source_changes(results_status: Any, repository: Path) -> None:
    made_from = results_status.fingerprint_of(results_status.sources_of(repository))
    assert says(results_status, repository, "fa3-grid", made_from) == "current, from a day"
    write(repository, "src/core/arena.h", "// other\n")
    commit(repository)
    assert says(results_status, repository, "fa3-grid", made_from).startswith("OLDER")


def test_a_record_of_some_kernels_minds_their_sources_alone(results_status: Any, repository: Path) -> None:
    made_from = results_status.fingerprint_of(results_status.sources_of(repository))
    write(repository, "src/cuda/mma/mma.cu", "// other\n")
    commit(repository)
    assert "none of those it measures" in says(results_status, repository, "norm", made_from)
    assert says(results_status, repository, "tests", made_from).startswith("OLDER")


@pytest.mark.parametrize(
    "name",
    ["src/cuda/norm/norm.cu", "src/cuda/tile/team.h", "src/cuda/tile/team.cu", "include/tilewise/error.h"],
)
def test_what_is_included_is_among_them(results_status: Any, repository: Path, name: str) -> None:
    made_from = results_status.fingerprint_of(results_status.sources_of(repository))
    write(repository, name, (repository / name).read_text() + "// other\n")
    commit(repository)
    assert says(results_status, repository, "norm", made_from).startswith("OLDER")


def test_sources_that_no_commit_has_are_others(results_status: Any, repository: Path) -> None:
    assert says(results_status, repository, "norm", "0" * 64).startswith("OLDER")
    assert says(results_status, repository, "norm", None) == "does not say which sources it was made from"


def test_without_a_repository_a_record_is_of_all_sources(results_status: Any, repository: Path) -> None:
    made_from = results_status.fingerprint_of(results_status.sources_of(repository))
    shutil.rmtree(repository / ".git")
    assert says(results_status, repository, "norm", made_from) == "current, from a day"
    write(repository, "src/cuda/mma/mma.cu", "// other\n")
    assert says(results_status, repository, "norm", made_from).startswith("OLDER")


def test_records_of_tests_are_of_these_too(results_status: Any, repository: Path) -> None:
    made_from = results_status.fingerprint_of(results_status.sources_of(repository))
    write(repository, "tests/cuda/some_test.cpp", "\n")
    tests = results_status.fingerprint_of(results_status.sources_of(repository, results_status.TEST_FOLDERS))
    assert says(results_status, repository, "tests", made_from, tests) == "current, from a day"
    assert says(results_status, repository, "ladder", made_from) == "current, from a day"
    write(repository, "tests/cuda/some_test.cpp", "// other\n")
    assert says(results_status, repository, "tests", made_from, tests) == "OLDER than the tests, from a day"
    assert says(results_status, repository, "ladder", made_from) == "current, from a day"


def test_failures_are_said(results_status: Any, repository: Path) -> None:
    made_from = results_status.fingerprint_of(results_status.sources_of(repository))
    found = says(results_status, repository, "ladder", made_from, failed=2)
    assert found == "current, from a day, WITH 2 FAILED"
