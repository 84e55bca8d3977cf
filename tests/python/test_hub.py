"""The tree for Hugging Face's kernels package: its metadata, and an import from its folder."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from tilewise import _binding

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "hub.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a staged tree has no scripts/hub.py")


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hub", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds: this package, and the library that the tests run on."""
    path = tmp_path_factory.mktemp("wheel") / "tilewise-0.1.0-py3-none-any.whl"
    package = Path(_binding.__file__).parent
    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted(package.rglob("*.py")):
            archive.write(source, f"tilewise/{source.relative_to(package)}")
        archive.write(_binding.library_path(), "tilewise/_tilewise.so")
        for name in ("LICENSE", "NOTICE"):
            archive.write(ROOT / name, f"tilewise-0.1.0.dist-info/licenses/{name}")
    return path


def test_variants_are_those_whose_drivers_run_the_binary(
    hub: ModuleType, wheel: Path, tmp_path: Path
) -> None:
    def names(cuda: tuple[int, int] | None, folder: str) -> list[str]:
        return [path.name for path in hub.lay_out(wheel, tmp_path / folder, cuda, None)]

    cpu = "torch-stable-abi210-cpu-x86_64-linux"
    assert names(None, "none") == [cpu]
    assert names((13, 0), "13") == [cpu, "torch-stable-abi210-cu130-x86_64-linux"]
    twelve = ["torch-stable-abi210-cu126-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"]
    assert names((12, 8), "12") == [cpu, *twelve]


def test_metadata_names_every_file(hub: ModuleType, wheel: Path, tmp_path: Path) -> None:
    (variant,) = hub.lay_out(wheel, tmp_path, None, "ab" * 20)
    metadata = json.loads((variant / "metadata.json").read_text())
    files = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    assert set(metadata["digest"]["files"]) == files - {"metadata.json"}
    assert {"__init__.py", "LICENSE", "NOTICE", "tilewise/__init__.py", "tilewise/_tilewise.so"} <= files
    assert metadata["provenance"]["kernel"] == {"commit": "ab" * 20, "dirty": False}


def test_the_kernels_package_loads_it_from_a_folder(hub: ModuleType, wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("kernels")
    (variant,) = hub.lay_out(wheel, tmp_path, None, "ab" * 20)
    program = f"""
import sys
sys.path = [path for path in sys.path if path != {str(Path(_binding.__file__).parents[1])!r}]
from pathlib import Path
import torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata
variant = Path({str(variant)!r})
expected = Metadata.read_from_file(variant / "metadata.json").digest
expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
tilewise = get_local_kernel(Path({str(tmp_path)!r}), backend="cpu")
q = torch.randn(1, 2, 8, 16, requires_grad=True)
tilewise.attention(q, q, q, is_causal=True).sum().backward()
assert q.grad is not None and str(variant) in sys.modules["tilewise"].__file__
assert str(variant) in str(sys.modules["tilewise._binding"].library_path())
"""
    environment = {name: value for name, value in os.environ.items() if name != "TILEWISE_TORCH_LIBRARY"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
