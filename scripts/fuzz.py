"""Runs the fuzzers of tests/fuzz: fuzz.py [--seconds N] [target ...].

Builds the preset fuzz, which needs clang++ with libFuzzer; without it says so and ends. Starts from
tests/fuzz/corpus and what earlier runs left in build/fuzz/corpus. A finding is printed as a line for the
corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("attention", "operations", "layer")
MOST_KEPT = 100  # inputs of a target in git
COMPILER = os.environ.get("TILEWISE_FUZZ_CXX", "clang++")
EMPTY_FUZZER = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'


def missing() -> str:
    """Why nothing can be fuzzed here; empty where it can."""
    command = [COMPILER, "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o", "/dev/null"]
    try:
        done = subprocess.run(command, input=EMPTY_FUZZER, text=True, capture_output=True)
    except FileNotFoundError:
        return f"no {COMPILER} (Debian: clang)"
    return (
        ""
        if done.returncode == 0
        else f"{COMPILER} has no libFuzzer (Debian: libclang-rt-14-dev, or libclang-rt-dev)"
    )


def read_corpus(target: str, folder: Path) -> None:
    """Writes the inputs of the hexadecimal corpus as files, which is what libFuzzer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in (ROOT / "tests/fuzz/corpus" / f"{target}.hex").read_text().splitlines():
        data = bytes.fromhex(line.partition("#")[0])
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def fuzz(target: str, tree: Path, seconds: int) -> str:
    """One fuzzer for so long. Gives a line about it; where it found something, prints that and raises."""
    corpus, found = tree / "corpus" / target, tree / "found"
    read_corpus(target, corpus)
    found.mkdir(exist_ok=True)
    known = set(found.iterdir())
    command = [str(tree / "tests/fuzz" / f"fuzz_{target}"), str(corpus), f"-max_total_time={seconds}"]
    command += ["-max_len=256", "-len_control=0", "-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1"]
    command += [f"-artifact_prefix={found}/{target}-"]
    done = subprocess.run(
        command, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    numbers = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stdout))
    edges = re.findall(r"cov: (\d+)", done.stdout)
    summary = (
        f"fuzz {target}: {numbers.get('number_of_executed_units', '?')} executions, "
        f"{numbers.get('average_exec_per_sec', '?')} each second, {edges[-1] if edges else '?'} edges"
    )
    if done.returncode == 0:
        return summary
    print(done.stdout[-8000:])
    for path in sorted(set(found.iterdir()) - known):
        print(f"for tests/fuzz/corpus/{target}.hex:\n{path.read_bytes().hex()}")
    raise RuntimeError(f"{summary}: FAILED")


def keep(target: str, tree: Path) -> str:
    """Makes the corpus of a target anew: inputs with a remark stay; of as few others as reach the same edges
    it takes short ones and long ones alike."""
    file = ROOT / "tests/fuzz/corpus" / f"{target}.hex"
    remarked = [line for line in file.read_text().splitlines() if "#" in line]
    merged = tree / "merged" / target
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    command = [str(tree / "tests/fuzz" / f"fuzz_{target}"), "-set_cover_merge=1", "-use_counters=0"]
    subprocess.run([*command, str(merged), str(tree / "corpus" / target)], check=True, capture_output=True)
    few = sorted((path.read_bytes() for path in merged.iterdir()), key=lambda data: (len(data), data))
    room = max(1, MOST_KEPT - len(remarked))
    step = max(1, -(-len(few) // room))  # rounded up
    lines = [*remarked, *(data.hex() for data in few[::step])]
    file.write_text("".join(f"{line}\n" for line in lines))
    return f"kept {len(lines)} inputs of {target}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the fuzzers of tests/fuzz.")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="put what was found into tests/fuzz/corpus")
    parser.add_argument("--tree", type=Path, help="a tree that has been built")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    settings = parser.parse_args()
    if settings.tree is None:
        if reason := missing():
            print(f"fuzz: skipped: {reason}")
            return 0
        if subprocess.run([ROOT / "scripts/build.sh", "fuzz"]).returncode != 0:
            return 1
    tree = settings.tree or ROOT / "build/fuzz"
    with ThreadPoolExecutor(min(len(settings.targets), len(os.sched_getaffinity(0)))) as pool:
        work = keep if settings.keep else partial(fuzz, seconds=settings.seconds)
        runs = [pool.submit(work, target, tree) for target in settings.targets]
    for run in runs:
        print(run.exception() or run.result())
    return 1 if any(run.exception() for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
