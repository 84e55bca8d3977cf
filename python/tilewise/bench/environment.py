"""Where a measurement is made: the first line of a record."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import _binding
from tilewise.bench.driver import NoGpu, find_gpu
from tilewise.bench.problem import BadInput

CPU_KERNELS = ("simd", "reference")
# Measurements under different values of these are not to be compared row by row.
IDENTITY = ("device", "gpu", "cpu", "threads", "torch", "tilewise", "binary", "sources")
_TREE = Path(tilewise.__path__[0]).parents[1]  # a checkout or a staged tree, where it is not installed


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the best one present."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # no name of a device
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device: expected cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"--device: expected an available device, got {name}: this PyTorch finds no GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device: expected one of {torch.cuda.device_count()} GPUs, got {name}")
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """What a reader of the record may want to know of machine and build."""
    return {
        "device": device.type,
        **(_gpu() if device.type == "cuda" else {"cpu": cpu_name(), "simd_levels": _binding.simd_levels()}),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tilewise": tilewise.__version__,
        "binary": _sha256(_binding.library_path())[:16],
        **_build(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


# The first compute capability that has a kernel's instructions. The others run on all that have code.
_NEEDS = {
    "mma": "8.0",
    "wgmma": "9.0a",
    "wgmma_halves": "9.0a",
    "wide_batched": "9.0a",
    "widened": "8.0",
    "split": "9.0a",
    "few_rows": "9.0a",
}
_PRODUCTS = ("simt", "mma", "wgmma", "split", "few_rows")


def cuda_build(code: Sequence[str], kernels: Sequence[str]) -> list[str]:
    """Which CUDA kernels a build has and for which GPUs, in lines; `code` is what `_binding.cuda_code` says.

    >>> code = ["75-virtual", "80-real", "90-real", "90a-real"]
    >>> print("\\n".join(cuda_build(code, ["wgmma", "mma", "simd"])))
    machine code for 8.0, 9.0, 9.0a; PTX for 7.5
    attention: wgmma 9.0a; mma 8.0 and newer
    products: simt 7.5 and newer; mma 8.0 and newer; wgmma 9.0a; split 9.0a; few_rows 9.0a
    >>> cuda_build([], ["simd"])
    ['none: this build has no CUDA kernels']
    """
    if not code:
        return ["none: this build has no CUDA kernels"]
    real = [_capability(x) for x in code if not x.endswith("-virtual")]
    virtual = [_capability(x) for x in code if x.endswith("-virtual") or x.isdecimal()]
    parts = [f"machine code for {', '.join(real)}"] if real else []
    parts += [f"PTX for {', '.join(virtual)}"] if virtual else []
    every = sorted({*real, *virtual}, key=_number)
    of_attention = [name for name in kernels if name not in CPU_KERNELS]
    lines = ["; ".join(parts)]
    for what, names in (("attention", of_attention), ("products", _PRODUCTS)):
        lines.append(f"{what}: {'; '.join(f'{name} {_runs_on(name, every)}' for name in names)}")
    return lines


def _capability(code: str) -> str:
    """
    >>> [_capability(x) for x in ("75-virtual", "100", "90a-real", "native")]
    ['7.5', '10.0', '9.0a', 'native']
    """
    found = re.match(r"(\d+)(\d)(a?)(-|$)", code)
    return f"{found[1]}.{found[2]}{found[3]}" if found else code.partition("-")[0]


def _number(capability: str) -> float:
    digits = capability.rstrip("a")
    return float(digits) if digits.replace(".", "").isdecimal() else 0.0


def _runs_on(kernel: str, every: Sequence[str]) -> str:
    needs = _NEEDS.get(kernel, "0")
    if needs.endswith("a"):  # an architecture's own instructions, which no newer one has
        return needs if needs in every else "not built"
    if words := [x for x in every if not _number(x)]:  # CMake's "native" or "all"
        return words[0]
    enough = [x for x in every if _number(x) >= _number(needs) and not x.endswith("a")]
    return f"{enough[0]} and newer" if enough else "not built"


def slug(environment: dict[str, Any]) -> str:
    """A folder's name for the machine's records.

    >>> slug({"gpu": "NVIDIA H200"}), slug({"cpu": "AMD EPYC 9R14 96-Core Processor"})
    ('nvidia-h200', 'amd-epyc-9r14')
    """
    name = environment.get("gpu") or environment.get("cpu") or "unknown"
    name = re.sub(r"\(r\)|\(tm\)|\d+-core processor|processor|cpu|@.*", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu() -> dict[str, Any]:
    try:
        fields = asdict(find_gpu())
        return {"gpu": fields.pop("name"), **fields}
    except NoGpu:  # torch found it all the same
        return {"gpu": torch.cuda.get_device_name()}


def _build() -> dict[str, Any]:
    """Of a staged tree: commit, compiler and fingerprint of the sources."""
    build, sources = _TREE / "BUILD.json", _TREE / "SOURCES.sha256"
    if not (build.is_file() and sources.is_file()):
        return {}
    return {**json.loads(build.read_text()), "sources": _sha256(sources)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
