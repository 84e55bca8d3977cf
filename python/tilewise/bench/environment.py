"""Where a measurement is made: the first line of a record."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import _binding
from tilewise.bench.driver import NoGpu, find_gpu
from tilewise.bench.problem import BadInput

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
        raise BadInput(f"--device: expected a device that is here, got {name}: this PyTorch finds no GPU")
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
