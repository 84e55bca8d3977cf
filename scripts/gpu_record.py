"""Where a staged tree runs, and the records it leaves: JSON lines, the environment first."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_driver import Gpu

STAGE = Path(__file__).resolve().parent


def torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def fingerprint() -> str:
    """Of all source files that the tree was built from. BUILD.json has one for each kernel, too."""
    return hashlib.sha256((STAGE / "SOURCES.sha256").read_bytes()).hexdigest()


def build() -> dict[str, Any]:
    """What the tree was built from and for."""
    return json.loads((STAGE / "BUILD.json").read_text())


def capability(gpu: Gpu) -> int:
    """What the library takes this GPU for: 80 for 8.0. It is less than the GPU's own compute capability where
    the build has code of older ones alone, as in src/cuda/runtime/device.cpp."""
    own = int(gpu.compute_capability.replace(".", ""))
    code = max(
        (
            int(number)
            for number, kind in re.findall(r"(\d+)(-real|-virtual)?", build()["architectures"])
            if int(number) <= own and (kind != "-real" or int(number) // 10 == own // 10)
        ),
        default=own,
    )
    return own if code >= 90 else code


def environment(gpu: Gpu | None, of_tests: bool = False) -> dict[str, Any]:
    described = {"gpu": None}
    if gpu:
        fields = asdict(gpu)
        described = {"gpu": fields.pop("name"), **fields}
    return {
        "environment": {
            **described,
            "torch": torch_version(),
            "python": platform.python_version(),
            **build(),
            "sources": fingerprint(),
            **({"tests": (STAGE / "TESTS").read_text().strip()} if of_tests else {}),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
    }


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Record:
    """A file of JSON lines, written as they come, so that an interrupted run leaves what it has."""

    def __init__(
        self, path: Path | None, gpu: Gpu | None, replacing: set[str] | None = None, of_tests: bool = False
    ) -> None:
        """With `replacing`, a record of the same sources is kept, less the lines of these suites."""
        self.path = path
        if not path:
            return
        kept = lines_of(path) if replacing is not None else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        now = environment(gpu, of_tests)
        before = kept[0]["environment"] if kept else {}
        if before and all(before.get(key) == now["environment"].get(key) for key in ("sources", "tests")):
            for line in kept:
                if "total" not in line and line.get("suite") not in (replacing or set()):
                    self.add(line)
        else:
            self.add(now)

    def add(self, line: dict[str, Any]) -> None:
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def close(self, suites: int, seconds: float) -> None:
        """The last line: the sums over the record's suites; how many this run had, and how long it took."""
        if self.path:
            lines = [line for line in lines_of(self.path) if "suite" in line]
            sums = {key: sum(line[key] for line in lines) for key in ("passed", "failed", "skipped")}
            self.add({"total": {"suites": len(lines), **sums}, "run": {"suites": suites, "seconds": seconds}})


def check_stage() -> None:
    if not (STAGE / "SOURCES.sha256").exists():
        raise SystemExit(f"{STAGE} is not a staged tree: run `make stage`, then this from build/stage")
