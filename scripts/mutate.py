"""Breaks the checks of arguments one at a time and lists what no test notices: mutate.py [--count N].

Works in a copy of the tree, build/mutate. A mutant is a changed operator, a negated condition or a check that
is left out. Its tests are built and run; a survivor is a missing test, or a change that changes nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build/mutate"
BUILD = COPY / "build/cpu"  # as deep as trees of this checkout, so that a compiler cache knows their files
FILES = (
    "src/core/checks.h",
    "src/core/checks.cpp",
    "src/core/kernel_list.cpp",
    "src/core/overlap.cpp",
    "src/attention/validate.cpp",
    "src/attention/validate_indices.cpp",
    "src/attention/validate_inputs.cpp",
    "src/gemm/validate.cpp",
    "src/ffn/validate.cpp",
    "src/norm/validate.cpp",
    "src/rope/validate.cpp",
    "src/layer/validate.cpp",
)
# The tests of a folder's checks, fastest first. Left out are those that compute for long.
CORE = ("core_test", "--gtest_filter=HostileArguments*:KernelList*:*Overlap*:Tensor*:Arena*:Unused*")
ATTENTION = ("attention_test", "--gtest_filter=-Piece.*:IndexTensors.*:RandomMmaProblem.*")
LAYER = ("layer_test",)
REPLAY = ("tilewise_fuzz_replay", str(ROOT / "tests/fuzz/corpus"))
TESTS = {"core": (CORE, ATTENTION, LAYER, REPLAY), "attention": (CORE, ATTENTION, REPLAY)}
OTHER_TESTS = (CORE, LAYER, REPLAY)

OPERATORS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + 1": " + 2",
    " - 1": "",
}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    what: str
    text: str  # of the whole file

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def mutants_of(file: str) -> list[Mutant]:
    text = (ROOT / file).read_text()
    mutants = []

    def add(first: int, last: int, new: str, what: str) -> None:
        line = text.count("\n", 0, first) + 1
        mutants.append(Mutant(file, line, what, text[:first] + new + text[last:]))

    code = re.sub(r"//[^\n]*|\"(\\.|[^\"\\])*\"", lambda match: " " * len(match[0]), text)
    for old, new in OPERATORS.items():
        for match in re.finditer(re.escape(old), code):
            line = text[text.rfind("\n", 0, match.start()) + 1 : text.find("\n", match.end())].strip()
            add(match.start(), match.end(), new, f"'{old.strip()}' is '{new.strip()}' in: {line}")
    for match in re.finditer(r"\bif \(", code):
        depth, end = 1, match.end()
        while depth > 0:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        condition = text[match.end() : end - 1]
        if ";" not in condition and "constexpr" not in text[match.start() - 10 : match.end()]:
            add(match.end(), end - 1, f"!({condition})", f"negated: {' '.join(condition.split())}")
    for match in re.finditer(r"(?<=\n) +check(_\w+)?\(", code):
        end = code.find(";\n", match.end())
        while code.count("{", match.start(), end) != code.count("}", match.start(), end):
            end = code.find(";\n", end + 1)
        what = " ".join(text[match.start() : end].split())
        add(match.start(), end + 1, "", f"left out: {what[:90]}")
    return mutants


def run(command: list[str], seconds: float) -> bool:
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def prepare() -> None:
    """A copy of the tree with its tests, at which the unchanged one passes."""
    COPY.mkdir(parents=True, exist_ok=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        to = COPY / name
        content = (ROOT / name).read_bytes()
        if not to.exists() or to.read_bytes() != content:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(content)
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DTILEWISE_CUDA=OFF",
        "-DTILEWISE_TORCH=OFF",
        "-DTILEWISE_WERROR=OFF",
    ]
    subprocess.run(
        ["cmake", "-S", COPY, "-B", BUILD, "-G", "Ninja", *flags], check=True, stdout=subprocess.DEVNULL
    )


def tests_of(file: str) -> tuple[tuple[str, ...], ...]:
    return TESTS.get(file.split("/")[1], OTHER_TESTS)


def build(file: str) -> bool:
    programs = [test[0] for test in tests_of(file)]
    return run(["cmake", "--build", str(BUILD), f"-j{os.cpu_count()}", "--target", *programs], 3600)


def passes(file: str) -> bool:
    folders = [BUILD / "tests", BUILD / "tests/fuzz"]
    for name, *arguments in tests_of(file):
        program = next(folder / name for folder in folders if (folder / name).exists())
        if not run([str(program), *arguments], 300):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="mutants, drawn at random (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (%(default)s)")
    parser.add_argument("--list", action="store_true", help="only list all mutants")
    parser.add_argument("files", nargs="*", default=FILES, help="sources of the checks")
    settings = parser.parse_args()
    everything = [mutant for file in settings.files for mutant in mutants_of(file)]
    if settings.list:
        print(*everything, f"{len(everything)} mutants", sep="\n")
        return 0
    prepare()
    for file in sorted({mutant.file.split("/")[1]: mutant.file for mutant in everything}.values()):
        if not build(file) or not passes(file):
            sys.exit(f"the tests of {file} fail without a mutant")
    chosen = random.Random(settings.seed).sample(everything, min(settings.count, len(everything)))
    outcomes = {"killed": 0, "not built": 0, "survived": 0}
    start = time.monotonic()
    for mutant in chosen:
        file = COPY / mutant.file
        original = file.read_text()
        try:
            file.write_text(mutant.text)
            outcome = (
                "not built" if not build(mutant.file) else "survived" if passes(mutant.file) else "killed"
            )
        finally:
            file.write_text(original)
        outcomes[outcome] += 1
        print(f"{outcome:9}  {mutant}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    print(
        f"seed {settings.seed}, {len(chosen)} of {len(everything)} mutants, {time.monotonic() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
