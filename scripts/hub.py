"""Lays the wheel in build/wheel out as Hugging Face's kernels package loads it, into build/hub.

A repository of the Kernel Hub has a folder for each variant of a build, named for the framework, the device
and the machine. Tilewise uses torch's stable ABI and links CUDA's runtime statically, so
that all variants hold the same files: one for CPUs, and one for each
major version of CUDA whose drivers run the binary.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch-stable-abi210"  # 2.10 and later
MACHINE = "x86_64-linux"
ARCHS = ["7.5", "8.0", "8.6", "8.9", "9.0"]  # whose kernels are in the binary, or run those of an older one
OPENING = '''"""Tilewise, as Hugging Face's kernels package loads it: from a path, under another name."""

import importlib.util as _util
import sys as _sys
from pathlib import Path as _Path


def _load():
    # The package imports itself by its name, and operators are registered once a process: one that is already
    # imported is the one to use.
    if "tilewise" in _sys.modules:
        return _sys.modules["tilewise"]
    spec = _util.spec_from_file_location("tilewise", _Path(__file__).parent / "tilewise" / "__init__.py")
    package = _sys.modules["tilewise"] = _util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del _sys.modules["tilewise"]
        raise
    return package


_package = _load()
from tilewise.integrations import flash_attn as _flash_attn

# By flash-attn's names transformers finds what attn_implementation="<owner>/<repository>" runs.
_exported = {name: getattr(module, name) for module in (_package, _flash_attn) for name in module.__all__}
__all__ = list(_exported)
globals().update(_exported)
'''
CARD = """---
library_name: kernels
license: mit
tags:
- kernels
- attention
---

# Tilewise

Exact attention, forward and backward, and the transformer layer around it, on GPUs and CPUs.

```python
from kernels import get_kernel

tilewise = get_kernel("<owner>/tilewise", version=1, trust_remote_code=True)
out = tilewise.attention(query, key, value, is_causal=True)
```

transformers takes it as an attention implementation. Continuous batching wants `flash` in its name.

```python
model.set_attn_implementation("<owner>/tilewise", allow_all_kernels=True)
```
"""


def main() -> int:
    wheels = list((ROOT / "build" / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        print(f"build/wheel has {len(wheels)} wheels; make wheel builds one", file=sys.stderr)
        return 1
    folder = ROOT / "build" / "hub"
    shutil.rmtree(folder, ignore_errors=True)
    for variant in lay_out(wheels[0], folder, cuda_version(ROOT / "build" / "wheel-tree"), commit()):
        print(f"laid out  {variant.relative_to(ROOT)}")
    return 0


def lay_out(wheel: Path, folder: Path, cuda: tuple[int, int] | None, commit: str | None) -> list[Path]:
    """The folders of all variants. `cuda` is the version of nvcc that compiled the wheel, if it did."""
    version = re.match(r"tilewise-(\d+)\.(\d+)", wheel.name)
    assert version, wheel.name
    major = max(1, int(version[1]))
    found = [write_variant(wheel, folder, "cpu", {"type": "cpu"}, major, commit)]
    # A binary of nvcc 12 also runs on drivers of CUDA 13; one of nvcc 13 needs these.
    for backend in {None: [], 12: ["cu126", "cu130"]}.get(cuda[0] if cuda else None, ["cu130"]):
        found.append(write_variant(wheel, folder, backend, {"type": "cuda", "archs": ARCHS}, major, commit))
    (folder / "README.md").write_text(CARD)
    return found


def write_variant(
    wheel: Path, folder: Path, name: str, backend: dict[str, object], version: int, commit: str | None
) -> Path:
    variant = folder / "build" / f"{TORCH}-{name}-{MACHINE}"
    variant.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(variant, [x for x in archive.namelist() if x.startswith("tilewise/")])
        for path in archive.namelist():
            if path.endswith(("/LICENSE", "/NOTICE")):
                (variant / Path(path).name).write_bytes(archive.read(path))
    (variant / "__init__.py").write_text(OPENING)
    files = digests(variant)
    seal = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    metadata: dict[str, object] = {
        "id": f"_tilewise_{name}_{seal}",
        "name": "tilewise",
        "version": version,
        "license": "MIT",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": files},
    }
    if commit:
        builder = {"version": "scripts/hub.py"}
        metadata["provenance"] = {"kernel-builder": builder, "kernel": {"commit": commit, "dirty": False}}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def digests(variant: Path) -> dict[str, str]:
    """SHA-256 of every file but the metadata, as the kernels package writes it."""
    paths = sorted(path for path in variant.rglob("*") if path.is_file() and path.name != "metadata.json")
    return {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in paths
    }


def cuda_version(tree: Path) -> tuple[int, int] | None:
    """Of the compiler that a build tree uses."""
    for path in tree.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        if found := re.search(r'set\(CMAKE_CUDA_COMPILER_VERSION "(\d+)\.(\d+)', path.read_text()):
            return int(found[1]), int(found[2])
    return None


def commit() -> str | None:
    """The commit of a checkout without changes, of which a build can be made again."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "HEAD") or None if not git("status", "--porcelain") else None


if __name__ == "__main__":
    sys.exit(main())
