"""`tilewise profile --out`: kernels under ncu and nsys, with reports that stay.

A folder gets what ncu and nsys write, which their own programs open, a record of the counters for `tilewise
report`, and what was printed. Each tool that is not there is named; torch's profiler stands in for ncu.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewise.bench import files, profile
from tilewise.bench.implementations import Implementation
from tilewise.bench.kinds import AnyProblem
from tilewise.bench.measure import reason_of
from tilewise.bench.problem import BadInput

RECORD, TEXT, TIMELINE = "profile.jsonl", "profile.txt", "timeline"
NO_PERMISSION = "ERR_NVGPUCTRPERM"  # what ncu says where counters are reserved for root
Kernels = list[tuple[str, dict[str, float]]]


@dataclass(frozen=True)
class Target:
    """One implementation on one problem."""

    impl: str
    problem: AnyProblem

    def __str__(self) -> str:
        return f"{self.impl}, {self.problem}"

    @property
    def file_name(self) -> str:
        """
        >>> from tilewise.bench.problem import Problem
        >>> Target("torch math", Problem(hq=32, hkv=8, sq=4, sk=4)).file_name
        'torch-math-h32-8-s4-d64-f32-forward'
        """
        return re.sub(r"[^a-z0-9.]+", "-", str(self).lower()).strip("-")

    def line(self, kernel: str, figures: dict[str, float]) -> dict[str, Any]:
        """A record's line of one kernel that it launched."""
        of = self.problem.line()
        about = {"suite": "profile", "op": "profile", "of": of.pop("op"), "direction": of.pop("pass")}
        return {**of, **about, "impl": self.impl, "kernel": kernel, "figures": figures}


@dataclass
class Profiles:
    """What came of all targets."""

    tools: list[str] = field(default_factory=list)  # which there are, and what is missing without the others
    kernels: dict[Target, Kernels] = field(default_factory=dict)
    said: dict[Target, str] = field(default_factory=dict)  # on a CPU, where kernels have no figures
    refused: dict[Target, str] = field(default_factory=dict)

    def text(self) -> str:
        parts = ["\n".join(self.tools)]
        for target, kernels in self.kernels.items():
            told = (profile.ncu_text(profile.kernel_name(name), figures) for name, figures in kernels)
            parts.append("\n".join([str(target), *told]))
        parts += self.said.values()
        parts += ["\n".join(f"{target}: {why}" for target, why in self.refused.items())]
        return "\n\n".join(part for part in parts if part)

    def record(self, environment: dict[str, Any]) -> str:
        lines: list[dict[str, Any]] = [{"environment": environment}]
        for target, kernels in self.kernels.items():
            lines += [target.line(name, figures) for name, figures in kernels]
        return "".join(json.dumps(line) + "\n" for line in lines)


def program(options: Sequence[str]) -> list[str]:
    """This program again, as what nsys watches: all targets in one process."""
    return [sys.executable, "-m", "tilewise", "profile", "--watched", "--all", *options]


def watch(targets: Sequence[tuple[Implementation, AnyProblem]], device: torch.device) -> None:
    """A warm call of each target, in a range of NVTX with its name, while the profiler looks."""
    calls = []
    for implementation, problem in targets:
        try:
            with implementation.around(problem):
                calls.append((implementation, problem, profile.warmed(implementation, problem, device)))
        except Exception as error:  # it does not take the problem, or has no room
            print(f"{Target(implementation.name, problem)}: {reason_of(error)}", file=sys.stderr)
    torch.cuda.profiler.start()
    for implementation, problem, call in calls:
        with implementation.around(problem), torch.cuda.nvtx.range(str(Target(implementation.name, problem))):
            call()
            torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def run(
    targets: Sequence[Target], folder: Path, options: Sequence[str], by_torch: Callable[[Target], Kernels]
) -> Profiles:
    """Profiles targets into a folder. `options` choose them in a process of their own; `by_torch` is used
    where ncu is not there or may not read counters.
    """
    found = Profiles()
    with files.writing("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    found.tools.append(_timeline(folder, options))
    count, why = _counters(targets, folder, found)
    if why:
        found.tools.append(f"{why}: torch's profiler gives times and estimated occupancy instead")
        _without_counters([x for x in targets if x not in found.kernels], found, by_torch)
    else:
        found.tools.append(f"ncu: {count} of {len(targets)} reports, {folder}/*.ncu-rep")
    return found


def _timeline(folder: Path, options: Sequence[str]) -> str:
    """One report of nsys with all targets; what it is, or why there is none."""
    if not shutil.which("nsys"):
        return "nsys is not in PATH: no timeline"
    path = folder / f"{TIMELINE}.nsys-rep"
    asked = ["nsys", "profile", "--trace=cuda,nvtx", "--capture-range=cudaProfilerApi"]
    asked += ["--force-overwrite=true", "--output", str(folder / TIMELINE)]
    path.unlink(missing_ok=True)
    said = _said([*asked, *program(options)])
    if not path.exists():
        return f"nsys wrote no timeline: {profile.last_line(said)}"
    return f"nsys: a timeline with a range for each kernel, {path}"


def _counters(targets: Sequence[Target], folder: Path, found: Profiles) -> tuple[int, str]:
    """How many reports ncu wrote, and why it could write none."""
    if not shutil.which("ncu"):
        return 0, "ncu is not in PATH"
    count = 0
    for target in targets:
        path = folder / f"{target.file_name}.ncu-rep"
        path.unlink(missing_ok=True)
        watched = profile.command(target.problem, target.impl)
        keep = ["--set", "detailed", "--force-overwrite", "--export", str(path)]
        try:
            profile.ncu_report(watched, *keep)
        except RuntimeError as error:
            if NO_PERMISSION in str(error):
                return count, f"ncu may not read counters here ({NO_PERMISSION})"
            found.refused[target] = str(error)
            continue
        kernels = profile.parse_ncu(_said(["ncu", "--import", str(path), *profile.NCU_TABLE]))
        if kernels:
            found.kernels[target] = kernels
            count += 1
        else:
            found.refused[target] = f"ncu cannot read its own report {path.name}"
    return count, ""


def _without_counters(
    targets: Sequence[Target], found: Profiles, by_torch: Callable[[Target], Kernels]
) -> None:
    for target in targets:
        try:
            found.kernels[target] = by_torch(target)
        except Exception as error:
            found.refused[target] = reason_of(error)


# CPU


def on_cpu(targets: Mapping[Target, Implementation]) -> Profiles:
    """Rates beside those of a product and a copy, as there are no counters."""
    found = Profiles(
        ["ncu and nsys need a GPU: on a CPU, rates are compared with those of a matrix product and a copy"]
    )
    for target, implementation in targets.items():
        try:
            found.said[target] = profile.on_cpu(implementation, target.problem, torch.device("cpu"))
        except BadInput as error:  # it does not take the problem
            found.refused[target] = str(error).partition(" cannot: ")[2]
    return found


def _said(arguments: Sequence[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
