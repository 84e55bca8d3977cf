"""Runs checks and counts: test.py [lint] [preset ...] [python]. The closing line is `N passed, N failed`.

What cannot be built cannot be tested: after a failed build nothing else runs, and its errors are said again.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import fuzz

ROOT = Path(__file__).resolve().parent.parent
ERROR = re.compile(r"\berror *:|^FAILED: |CMake Error|undefined reference")  # compilers, linkers, CMake
ERRORS_SHOWN = 10

Results = list[tuple[str, str]]  # a name, and "run", "fail" or why it was left out


class BuildFailed(Exception):
    """With the lines of the build that say what is wrong."""


def run(*command: str, **environment: str) -> bool:
    print(f"\n> {' '.join(command)}", flush=True)
    variables = os.environ | environment
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=variables).returncode == 0


def build(preset: str) -> None:
    """Builds a preset and shows what it says. On a terminal, progress takes one line, as Ninja's does."""
    command = ["scripts/build.sh", preset]
    print(f"\n> {' '.join(command)}", flush=True)
    errors = []
    progress = False
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout
        for line in process.stdout:
            was_progress, progress = progress, sys.stdout.isatty() and line.startswith("[")
            before = "\r\033[K" if was_progress and progress else "\n" if was_progress else ""
            print(before + (line.rstrip() if progress else line), end="", flush=True)
            if ERROR.search(line):
                errors.append(line.rstrip())
    if progress:
        print()
    if process.returncode:
        raise BuildFailed(errors[:ERRORS_SHOWN] or ["it says nothing; its output is above"])


def run_lint() -> Results:
    return [("lint", "run" if run("scripts/lint.sh") else "fail")]


def run_preset(preset: str) -> Results:
    """Builds a preset and runs its tests; returns each one's name and the status ctest gave it."""
    if preset == "fuzz" and (reason := fuzz.missing()):
        return [(f"fuzz: {reason}", "skip")]
    if preset in ("emulated", "races") and not shutil.which("nvcc"):
        return [(f"{preset}: no CUDA toolkit, whose headers it needs", "skip")]
    build(preset)
    report = ROOT / "build" / preset / "tests.xml"
    report.unlink(missing_ok=True)
    jobs = len(os.sched_getaffinity(0))
    passed = run("ctest", "--preset", preset, "--parallel", str(jobs), "--output-junit", str(report))
    cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else []
    results = [(f"{preset}: {case.get('name')}", case.get("status", "fail")) for case in cases]
    if not passed and all(status != "fail" for _, status in results):
        results.append((f"{preset}: ctest", "fail"))
    return results


def run_python() -> Results:
    """The tests of the PyTorch package, on the binding of the release build, which has been built."""
    report = ROOT / "build" / "python.xml"
    report.unlink(missing_ok=True)
    passed = run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"),
        PYTHONPATH=str(ROOT / "python"),
        TILEWISE_TORCH_LIBRARY=str(ROOT / "build" / "release" / "bindings" / "torch" / "_tilewise.so"),
    )
    results = []
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else []:
        outcomes = {child.tag for child in case}
        status = "fail" if outcomes & {"failure", "error"} else "skip" if "skipped" in outcomes else "run"
        results.append((f"python: {case.get('classname')}.{case.get('name')}", status))
    if not passed and all(status != "fail" for _, status in results):
        results.append(("python: pytest", "fail"))
    return results


STEPS = {"lint": run_lint, "python": run_python}  # and the presets


def main(steps: list[str]) -> int:
    results: Results = []
    errors: list[str] = []
    for step in steps:
        try:
            results += {"lint": run_lint, "python": run_python}.get(
                step, lambda step=step: run_preset(step)
            )()
        except BuildFailed as failure:
            results.append((f"{step}: build", "fail"))
            errors = failure.args[0]
            break

    passed = [name for name, status in results if status == "run"]
    failed = [name for name, status in results if status == "fail"]
    print()
    for name, status in results:
        if status not in ("run", "fail"):
            print(f"skipped  {name}")
    for name in failed:
        print(f"FAILED   {name}")
    for error in errors:
        print(f"         {error}")
    print(f"{len(passed)} passed, {len(failed)} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
