"""Finds programs that are no part of the package: examples and scripts."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


WITHOUT = """import runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")"""


def without(package: str, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program at `path` under examples/, run as if `package` were not installed."""
    command = [sys.executable, "-c", WITHOUT, package, str(EXAMPLES / path), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def load(path: str) -> ModuleType:
    """The program at `path` in the checkout, as a module."""
    file = ROOT / path
    if not file.exists() and not (ROOT / "src").exists():
        pytest.skip(f"a staged tree has no {path}", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def example(monkeypatch: pytest.MonkeyPatch, folder: str, *names: str) -> Iterator[SimpleNamespace]:
    """For a fixture: modules of an example. Other examples have some of the same names."""
    if not EXAMPLES.exists():
        pytest.skip("a staged tree has no examples")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is this small is slower with more
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]
    torch.set_num_threads(threads)
