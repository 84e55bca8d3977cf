"""Measures what the tests run: coverage.py [cpp] [python]. Fails where less runs than the floors below ask.

C++: lines and branches of src/ that are compiled for the CPU, from the preset `coverage` and gcov. A line or
a branch counts once, in however many files and for however many SIMD levels it is compiled. Branches that
only an exception takes do not count. Python: lines of the package, by coverage.py, which is installed into
build/coverage.
"""

import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "coverage"
# The tests' helpers, too: the linker may take an inline function of the library from them.
COUNTED = ("tilewise_objects", "tilewise_test_support")
LINES_FLOOR = 99.0  # per cent of the lines of src/
PYTHON_FLOOR = 95  # per cent of the lines of python/tilewise


class File:
    """What ran of a source."""

    def __init__(self) -> None:
        self.lines: dict[int, int] = defaultdict(int)
        self.branches: dict[tuple[int, int], int] = defaultdict(int)

    def missing(self) -> list[int]:
        return sorted(line for line, count in self.lines.items() if count == 0)


def gcov(counts: Path) -> list[dict]:
    """gcov's account of one object file: its sources with their lines."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["gcov", "--json-format", "--branch-probabilities", str(counts)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [
            file
            for report in Path(folder).glob("*.gcov.json.gz")
            for file in json.loads(gzip.decompress(report.read_bytes()))["files"]
        ]


def source_of(name: str) -> str | None:
    """The path below src/, or None for what is not ours or not the CPU's."""
    path = Path(os.path.normpath(TREE / name))
    if not path.is_relative_to(ROOT / "src") or path.is_relative_to(ROOT / "src" / "cuda"):
        return None
    return str(path.relative_to(ROOT))


def read_counts() -> dict[str, File]:
    files: dict[str, File] = defaultdict(File)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counts = (sorted(TREE.rglob(f"{target}.dir/**/*.gcda")) for target in COUNTED)
        reports = pool.map(gcov, itertools.chain(*counts))
        for report in (file for reports_of_one in reports for file in reports_of_one):
            source = source_of(report["file"])
            if source is None:
                continue
            for line in report["lines"]:
                number = line["line_number"]
                files[source].lines[number] += line["count"]
                for index, branch in enumerate(b for b in line["branches"] if not b["throw"]):
                    files[source].branches[number, index] += branch["count"]
    return files


def share(counts: list[int]) -> float:
    return 100 * sum(count > 0 for count in counts) / len(counts)


def run_cpp() -> bool:
    for old in TREE.rglob("*.gcda"):
        old.unlink()
    run("scripts/build.sh", "coverage")
    run("ctest", "--preset", "coverage", "--parallel", str(len(os.sched_getaffinity(0))))
    files = read_counts()
    if not files:
        sys.exit("coverage.py: no counts were found; were the tests built by the preset coverage?")
    for name, file in sorted(files.items()):
        if missing := file.missing():
            print(f"{name}: {len(missing)} of {len(file.lines)} lines never ran: {missing}")
    lines = share([count for file in files.values() for count in file.lines.values()])
    branches = share([count for file in files.values() for count in file.branches.values()])
    print(f"C++: {lines:.2f} % of lines, {branches:.2f} % of branches of {len(files)} files in src/")
    return report_floor("C++", lines, LINES_FLOOR)


def run_python() -> bool:
    packages = TREE / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--require-hashes",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--upgrade",
        "--target",
        str(packages),
        "-r",
        "scripts/requirements-coverage.txt",
    )
    environment = {
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT / 'python'}",
        "TILEWISE_TORCH_LIBRARY": str(ROOT / "build" / "release" / "bindings" / "torch" / "_tilewise.so"),
        "COVERAGE_FILE": str(TREE / "python.coverage"),
    }
    run("scripts/build.sh", "release")
    # Processes that tests start count, too. Triton's interpreter, which runs the kernel in Triton, does not.
    settings = TREE / "python.coveragerc"
    settings.write_text(
        "[run]\n"
        f"source = {ROOT / 'python' / 'tilewise'}\n"
        "omit = */_triton/kernels.py,*/_triton/launch.py\n"
        "concurrency = multiprocessing,thread\n"
        "parallel = true\n"
    )
    environment["COVERAGE_RCFILE"] = str(settings)
    for old in TREE.glob("python.coverage*"):
        if old != settings:
            old.unlink()
    measured = (
        "-m",
        "coverage",
        "run",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
    )
    run(sys.executable, *measured, **environment)
    run(sys.executable, "-m", "coverage", "combine", "--quiet", **environment)
    run(sys.executable, "-m", "coverage", "report", "--skip-covered", **environment)
    total = subprocess.run(
        [sys.executable, "-m", "coverage", "report", "--format=total", "--precision=2"],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return report_floor("Python", float(total.stdout), PYTHON_FLOOR)


def report_floor(what: str, found: float, floor: float) -> bool:
    if found < floor:
        print(f"{what}: {found:.2f} % of lines ran, and {floor} % is the least", flush=True)
    return found >= floor


def run(*command: str, **environment: str) -> None:
    print(f"\n> {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=os.environ | environment)
    if done.returncode != 0:
        sys.exit(f"coverage.py: {command[0]} failed")


def main(parts: list[str]) -> int:
    kinds = {"cpp": run_cpp, "python": run_python}
    return 0 if all([kinds[part]() for part in parts or kinds]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
