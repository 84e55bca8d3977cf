"""Runs checks and counts: test.py [lint] [preset ...]. The closing line is `N passed, N failed`."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> bool:
    print(f"\n> {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode == 0


def run_lint() -> list[tuple[str, str]]:
    return [("lint", "run" if run("scripts/lint.sh") else "fail")]


def run_preset(preset: str) -> list[tuple[str, str]]:
    """Builds a preset and runs its tests; returns each one's name and the status ctest gave it."""
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


def main(steps: list[str]) -> int:
    results: list[tuple[str, str]] = []
    for step in steps:
        results += run_lint() if step == "lint" else run_preset(step)

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
