"""Runs checks and counts: test.py [lint] [preset ...] [python]. The closing line is `N passed, N failed`."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import fuzz

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, **environment: str) -> bool:
    print(f"\n> {' '.join(command)}", flush=True)
    variables = os.environ | environment
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=variables).returncode == 0


def run_lint() -> list[tuple[str, str]]:
    return [("lint", "run" if run("scripts/lint.sh") else "fail")]


def run_preset(preset: str) -> list[tuple[str, str]]:
    """Builds a preset and runs its tests; returns each one's name and the status ctest gave it."""
    if preset == "fuzz" and (reason := fuzz.missing()):
        return [(f"fuzz: {reason}", "skip")]
    if not run("scripts/build.sh", preset):
        return [(f"{preset}: build", "fail")]
    report = ROOT / "build" / preset / "tests.xml"
    report.unlink(missing_ok=True)
    jobs = len(os.sched_getaffinity(0))
    passed = run("ctest", "--preset", preset, "--parallel", str(jobs), "--output-junit", str(report))
    cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else []
    results = [(f"{preset}: {case.get('name')}", case.get("status", "fail")) for case in cases]
    if not passed and all(status != "fail" for _, status in results):
        results.append((f"{preset}: ctest", "fail"))
    return results


def run_python() -> list[tuple[str, str]]:
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


def main(steps: list[str]) -> int:
    results: list[tuple[str, str]] = []
    for step in steps:
        results += {"lint": run_lint, "python": run_python}.get(step, lambda step=step: run_preset(step))()

    passed = [name for name, status in results if status == "run"]
    failed = [name for name, status in results if status == "fail"]
    print()
    for name, status in results:
        if status not in ("run", "fail"):
            print(f"skipped  {name}")
    for name in failed:
        print(f"FAILED   {name}")
    print(f"{len(passed)} passed, {len(failed)} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
