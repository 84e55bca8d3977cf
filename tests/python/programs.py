"""Finds the examples, which are programs and no part of the package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


WITHOUT = """import runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv[:2] = []
runpy.run_path(sys.argv[0], run_name="__main__")"""


def without(package: str, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program at `path` under examples/, run as if `package` were not installed."""
    command = [sys.executable, "-c", WITHOUT, package, str(EXAMPLES / path), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def load(path: str) -> ModuleType:
    """The program at `path` under examples/, as a module."""
    file = EXAMPLES / path
    if not file.exists():
        pytest.skip("a staged tree has no examples", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
