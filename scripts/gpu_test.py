"""Runs the tests of a staged tree on this machine's GPU and records what came of them."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gpu_record
from gpu_driver import Gpu, NoGpu, find_gpu
from gpu_record import STAGE, Record
from gpu_sanitized import (
    F32_SEED,
    FEWER_IN_DOMAINS,
    FEWER_OF_TOOL,
    RACECHECKED,
    RACECHECKED_TESTS,
    SANITIZED_TESTS,
    SANITIZERS,
)

UNIT_TESTS = ("host_test",)
LARGE = "*CudaLarge*"  # tests of tens of gigabytes
SLOWEST = 3  # tests that a record names


@dataclass(frozen=True)
class Domain:
    """What random problems are drawn from."""

    arguments: tuple[str, ...] = ()
    share: float = 1.0  # of --count

    def problems(self, count: int) -> int:
        return max(1, round(self.share * count))


# Of random problems, wgmma and the backward of mma take few, and few reach the plain kernels: they have
# domains of their own. Of that of wgmma 85 % are taken, so there are more; in f32 few are, and the reference
# is slow. What mma takes in f32 is what the plain kernels of fused mend peaks in.
DOMAINS = {
    "property": Domain(),
    "property wgmma": Domain(("--domain=wgmma", "--kernel=wgmma"), 1.2),
    "property wgmma f32": Domain(("--domain=wgmma-f32", "--kernel=wgmma"), 0.08),
    "property mma": Domain(("--domain=mma", "--kernel=mma")),
    "property mma f32": Domain(("--domain=mma-f32", "--kernel=mma,fused"), 0.1),
    "property plain": Domain(("--domain=plain", "--kernel=fused,mma"), 0.2),
}

# A thread that waits must sleep, or it takes the core from another process.
SLEEPING = {"OMP_WAIT_POLICY": "passive"}


@dataclass
class Outcome:
    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)  # of this suite alone

    def line(self) -> dict[str, Any]:
        line = asdict(self)
        return line | line.pop("more")


def run(command: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Exit status and output of a command in the staged tree; 124 where it took too long."""
    try:
        done = subprocess.run(
            command,
            cwd=STAGE,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace") + f"\nstopped after {timeout:.0f} s\n"
    return done.returncode, done.stdout.decode(errors="replace")


def show_failure(command: list[str], output: str) -> None:
    print(f"--- {' '.join(command)}")
    print("\n".join(output.splitlines()[-80:]))


def unit_test(program: str, timeout: float) -> Outcome:
    """A GoogleTest program, its tests counted."""
    return counted(Outcome(program), [f"bin/{program}"], "--gtest_output=xml:", timeout)


def sharded_test(program: str, jobs: int, alone: str, quick: bool, timeout: float) -> Outcome:
    """The same in several processes, since the reference takes most of the time. Tests of `alone` have one
    for themselves: two at once would lack memory and be skipped; where `quick` they are not run."""
    shards = [
        ([f"--gtest_filter=-{alone}"], {"GTEST_TOTAL_SHARDS": str(jobs), "GTEST_SHARD_INDEX": str(shard)})
        for shard in range(jobs)
    ]
    if not quick:
        shards.insert(0, ([f"--gtest_filter={alone}"], {}))

    def run_shard(shard: tuple[list[str], dict[str, str]]) -> Outcome:
        options, environment = shard
        command = [f"bin/{program}", *options]
        return counted(Outcome(program), command, "--gtest_output=xml:", timeout, **SLEEPING, **environment)

    with ThreadPoolExecutor(len(shards)) as pool:
        outcome = joined(Outcome(program, more={"processes": len(shards)}), pool.map(run_shard, shards))
    if quick:
        outcome.more["left_out"] = alone
    return outcome


def joined(outcome: Outcome, parts: Iterable[Outcome]) -> Outcome:
    """What several processes found, as one outcome."""
    slowest: dict[str, float] = {}
    passed_of: Counter[str] = Counter()
    for part in parts:
        outcome.passed += part.passed
        outcome.failed += part.failed
        outcome.skipped += part.skipped
        slowest |= part.more["slowest"]
        for name, passed in part.more["passed_of"].items():
            passed_of[name] += passed
        for key in ("failures", "skipped_because"):
            if found := part.more.get(key):
                outcome.more[key] = sorted({*outcome.more.get(key, []), *found})
        if ended_in := part.more.get("ended_in"):
            outcome.more.setdefault("ended_in", []).append(ended_in)
    outcome.more["passed_of"] = dict(sorted(passed_of.items()))
    outcome.more["slowest"] = dict(sorted(slowest.items(), key=lambda test: -test[1])[:SLOWEST])
    return outcome


def reason_of(message: str) -> str:
    """Of a skipped test: the line after that of the place, without where the test stood."""
    lines = message.partition("Google Test trace:")[0].strip().splitlines()
    return lines[-1] if lines else "no reason"


def run_reporting(
    command: list[str], report_to: str, timeout: float, **environment: str
) -> tuple[int, str, list[ElementTree.Element]]:
    """As run(), with the tests in the report that the command leaves in JUnit's form."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status, output = run([*command, f"{report_to}{report}"], timeout, **environment)
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    return status, output, cases


def counted(
    outcome: Outcome, command: list[str], report_to: str, timeout: float, **environment: str
) -> Outcome:
    """Runs a command that leaves such a report, and counts the tests in it."""
    status, output, cases = run_reporting(command, report_to, timeout, **environment)
    reasons = set()
    failures = []
    passed_of: Counter[str] = Counter()  # by suite of tests
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
            failures.append(f"{case.get('classname')}.{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            outcome.skipped += 1
            reasons.add(reason_of(skip.get("message") or ""))
        else:
            outcome.passed += 1
            passed_of[str(case.get("classname"))] += 1
    if not cases:  # a program that crashed or was stopped leaves no report, but what it printed
        passed_of.update(re.findall(r"^\[       OK \] ([^.\s]+)\.", output, re.MULTILINE))
        outcome.passed = passed_of.total()
        failures = re.findall(r"^\[  FAILED  \] (\S+) \(", output, re.MULTILINE)
        begun = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
        outcome.failed = len(failures) + 1
        outcome.more["ended_in"] = begun[-1] if begun else "its beginning"
    if status != 0 and outcome.failed == 0:
        outcome.failed = 1
    if outcome.failed:
        show_failure(command, output)
    if failures:
        outcome.more["failures"] = failures
    if reasons:
        outcome.more["skipped_because"] = sorted(reasons)
    outcome.more["passed_of"] = dict(sorted(passed_of.items()))
    slowest = sorted(cases, key=lambda case: -float(case.get("time") or 0))[:SLOWEST]
    outcome.more["slowest"] = {
        str(case.get("name")): round(float(case.get("time") or 0), 1) for case in slowest
    }
    return outcome


class Taken:
    """How many problems each kernel took of each pass and type, and how often it made backward again for the
    same bits, as tilewise_property says at its end."""

    def __init__(self) -> None:
        self.passes: dict[str, Counter[str]] = {}  # by kernel
        self.of_types: dict[str, dict[str, Counter[str]]] = {}
        self.again: Counter[str] = Counter()

    def read(self, output: str) -> None:
        numbers = r"(\d+) forward, (\d+) backward, (\d+) backward again$"
        kernel = ""
        for line in output.splitlines():
            if sums := re.match(rf"(\w+) took {numbers}", line):
                kernel = sums[1]
                passes = Counter(forward=int(sums[2]), backward=int(sums[3]))
                self.passes.setdefault(kernel, Counter()).update(passes)
                self.again[kernel] += int(sums[4])
            elif kernel and (sums := re.match(rf"  of (\w+) {numbers}", line)):
                passes = Counter(forward=int(sums[2]), backward=int(sums[3]))
                self.of_types.setdefault(kernel, {}).setdefault(sums[1], Counter()).update(passes)

    def line(self) -> dict[str, Any]:
        return {
            "taken": {kernel: dict(passes) for kernel, passes in sorted(self.passes.items())},
            "taken_of_types": {
                kernel: {dtype: dict(passes) for dtype, passes in sorted(types.items())}
                for kernel, types in sorted(self.of_types.items())
            },
            "backward_again": dict(sorted(self.again.items())),
        }


def property_test(
    suite: str, domain: tuple[str, ...], count: int, seed: int, jobs: int, timeout: float
) -> Outcome:
    """Random problems on the GPU, in several processes since the reference takes most of the time. The first
    of them finds out wrong kernels for all."""
    shares = [count // jobs + (n < count % jobs) for n in range(jobs)]
    seeds = {seed + n: share for n, share in enumerate(shares) if share}
    outcome = Outcome(suite, more={"seeds": seeds})
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def run_share(own_seed: int) -> None:
        command = ["bin/tilewise_property", "--cuda", *domain, f"--threads={threads}"]
        command += [f"--count={seeds[own_seed]}", f"--seed={own_seed}"]
        command += ["--no-self-test"] if own_seed != seed else []
        status, output = run(command, timeout, **SLEEPING)
        # Counted by its closing line. Without one it was stopped or crashed: one more has failed, the one it
        # was at, and what comes after that was not tried.
        found = re.search(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)
        passed, failed, not_tried = (int(found[1]), int(found[2]), 0) if found else (0, 0, 0)
        if not found:
            progress = re.findall(r"^(\d+) of \d+ problems, (\d+) failed", output, re.MULTILINE)
            tried, missed = map(int, progress[-1]) if progress else (0, 0)
            passed, failed, not_tried = tried - missed, missed + 1, max(0, seeds[own_seed] - tried - 1)
        with lock:
            taken.read(output)  # what a kernel refuses passes, too
            outcome.passed += passed
            outcome.failed += failed if failed or status == 0 else 1
            if not_tried:
                outcome.more["not_tried"] = outcome.more.get("not_tried", 0) + not_tried
            outcome.more.setdefault("failures", []).extend(re.findall(r"--only (0x[0-9a-f]+)", output))
            if status != 0:
                show_failure(command, output)

    taken = Taken()
    lock = threading.Lock()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_share, seeds))
    outcome.more |= taken.line()
    return outcome


def python_test(timeout: float) -> Outcome:
    """The package's tests that are marked as the GPU's."""
    folders = [str(STAGE / "python"), os.environ.get("PYTHONPATH", "")]
    if not all(importlib.util.find_spec(name) for name in ("pytest", "hypothesis")):
        folders.append(str(STAGE / "tools"))
    command = [
        *(sys.executable, "-m", "pytest", "tests/python", "-m", "gpu"),
        *("-q", "-ra", "-p", "no:cacheprovider"),
    ]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
    return counted(Outcome("python"), command, "--junitxml=", timeout, **variables)


@dataclass
class NamedTests:
    """What came of the tests that a filter names."""

    ran: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # why, by test
    missed: list[str] = field(default_factory=list)  # patterns of which no test ran, though the device may

    @staticmethod
    def of(patterns: Iterable[str], cases: Iterable[ElementTree.Element]) -> NamedTests:
        tests = NamedTests()
        passed = set()
        for case in cases:
            name = f"{case.get('classname')}.{case.get('name')}"
            if (skip := case.find("skipped")) is not None:
                tests.skipped[name] = reason_of(skip.get("message") or "")
            elif case.find("failure") is None:
                passed.add(name)
        tests.ran = len(passed)
        # A kernel for another GPU is nothing that a list can mend.
        excused = {name for name, reason in tests.skipped.items() if "compute capability" in reason}
        tests.missed = [
            pattern for pattern in patterns if not fnmatch.filter(sorted(passed | excused), pattern)
        ]
        return tests

    def line(self) -> dict[str, Any]:
        found: dict[str, Any] = {"ran": self.ran}
        if self.skipped:
            found["skipped_tests"] = self.skipped
        if self.missed:
            found["missed"] = self.missed
        return found


def sanitize(suite: str, tool: str, program: str, arguments: list[str], timeout: float) -> Outcome:
    """One of compute-sanitizer's tools over a program. What passes is the program under it, so 1 or 0. Where
    it ran no problem, or none of the tests of a pattern, something was not checked."""
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=99", f"bin/{program}", *arguments]
    patterns = [
        pattern
        for argument in arguments
        if argument.startswith("--gtest_filter=")
        for pattern in argument.partition("=")[2].split(":")
    ]
    found: dict[str, Any]
    if patterns:
        status, output, cases = run_reporting(command, "--gtest_output=xml:", timeout)
        tests = NamedTests.of(patterns, cases)
        found, complete = tests.line(), not tests.missed
        if complete and status == 0 and not tests.ran:
            return Outcome(suite, skipped=1, more={"skipped_because": sorted(set(tests.skipped.values()))})
    else:
        status, output = run(command, timeout)
        counts = re.search(r"^(\d+) passed, 0 failed$", output, re.MULTILINE)
        taken = Taken()
        taken.read(output)
        found = {"ran": int(counts[1]) if counts else 0} | taken.line()
        complete = found["ran"] > 0
    summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.MULTILINE)
    clean = status == 0 and bool(summaries) and all(re.search(r": 0 ", summary) for summary in summaries)
    if not (clean and complete):
        show_failure(command, output)
    return Outcome(
        suite,
        passed=int(clean and complete),
        failed=int(not (clean and complete)),
        more={"tool": tool, "arguments": arguments, "summary": summaries, "exit_status": status} | found,
    )


def skipped(suite: str, reason: str) -> Outcome:
    return Outcome(suite, skipped=1, more={"skipped_because": [reason]})


Suites = Iterator[tuple[str, Callable[[], Outcome]]]


def test_suites(options: argparse.Namespace, no_gpu: str) -> Suites:
    for program in UNIT_TESTS:
        yield program, partial(unit_test, program, options.timeout)
    yield (
        "cuda_test",
        partial(sharded_test, "cuda_test", options.jobs, LARGE, options.quick, options.timeout),
    )
    for suite, domain in DOMAINS.items():
        if no_gpu:
            yield suite, partial(skipped, suite, no_gpu)
        else:
            problems = options.count if options.quick else domain.problems(options.count)
            settings = problems, options.seed, options.jobs, options.timeout
            yield suite, partial(property_test, suite, domain.arguments, *settings)
    if reason := no_gpu or no_package():
        yield "python", partial(skipped, "python", reason)
    else:
        yield "python", partial(python_test, options.timeout)


def no_package() -> str:
    if not (STAGE / "python/tilewise/_tilewise.so").exists():
        return "the PyTorch package is not in this staged tree"
    return "" if gpu_record.torch_version() else f"no torch in {sys.executable}"


def sanitized_programs(tool: str, options: argparse.Namespace) -> dict[str, list[str]]:
    """What runs under a sanitizer: random problems of several domains, and the small tests."""
    races = tool == "racecheck"
    count = max(1, options.sanitize_count // FEWER_OF_TOOL.get(tool, 1))
    few = max(1, count // FEWER_IN_DOMAINS)
    problems = ["--cuda", f"--seed={options.seed}", "--no-self-test"]  # that one is the CPU's alone
    f32 = ["--cuda", f"--seed={F32_SEED}", "--no-self-test", *DOMAINS["property mma f32"].arguments]
    kernels = [f"--kernel={','.join(RACECHECKED)}"] if races else []
    programs = {
        "tilewise_property": [*problems, *kernels, f"--count={count}"],
        "tilewise_property plain": [*problems, *kernels, "--domain=plain", f"--count={2 * few}"],
        "tilewise_property wgmma": [*problems, *DOMAINS["property wgmma"].arguments, f"--count={few}"],
        "tilewise_property mma": [*problems, *DOMAINS["property mma"].arguments, f"--count={few}"],
        "tilewise_property mma f32": [*f32, f"--count={few}"],
    }
    if races:
        del programs["tilewise_property wgmma"]
    for family, tests in (RACECHECKED_TESTS if races else SANITIZED_TESTS).items():
        programs[f"cuda_test {family}"] = [f"--gtest_filter={':'.join(tests)}", "--gtest_brief=1"]
    return programs


def sanitizer_suites(options: argparse.Namespace, no_gpu: str) -> Suites:
    reason = no_gpu or ("" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the PATH")
    for tool in SANITIZERS:
        for name, arguments in sanitized_programs(tool, options).items():
            suite = f"{tool} {name}"
            if reason:
                yield suite, partial(skipped, suite, reason)
            else:
                yield suite, partial(sanitize, suite, tool, name.split()[0], arguments, options.timeout)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-test", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder for the record, which goes to <out>/<gpu>/ (default: results)"
    )
    parser.add_argument(
        "--count", type=int, default=None, help="random problems; domains have a share of it (default: 5000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from (default: 1)")
    parser.add_argument(
        "--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes for them and for cuda_test"
    )
    parser.add_argument("--quick", action="store_true", help="500 problems, and no test of large memory")
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer's tools instead")
    parser.add_argument("--sanitize-count", type=int, default=40, help="random problems for each tool")
    parser.add_argument(
        "--only", action="append", help="run only the suite of this name, or those whose names contain it"
    )
    parser.add_argument(
        "--append", action="store_true", help="keep what the record has of other suites and the same sources"
    )
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each program")
    options = parser.parse_args()
    if options.count is None:
        options.count = 500 if options.quick else 5000
    if options.count < 1 or options.jobs < 1 or options.sanitize_count < 1:
        parser.error("counts must be 1 or more")
    return options


def timed(run_suite: Callable[[], Outcome]) -> Outcome:
    start = time.monotonic()
    outcome = run_suite()
    outcome.seconds = round(time.monotonic() - start, 2)
    return outcome


def describe(outcome: Outcome) -> str:
    text = f"{outcome.suite}: {outcome.passed} passed, {outcome.failed} failed"
    if outcome.skipped:
        text += f", {outcome.skipped} skipped ({'; '.join(outcome.more.get('skipped_because', []))})"
    if skipped_tests := outcome.more.get("skipped_tests"):
        reasons = "; ".join(sorted(set(skipped_tests.values())))
        text += f", {outcome.more['ran']} tests ran, {len(skipped_tests)} were skipped ({reasons})"
    if missed := outcome.more.get("missed"):
        text += f", nothing ran of {', '.join(missed)}"
    summaries = "".join(f", {summary}" for summary in outcome.more.get("summary", []))
    return f"{text}, {outcome.seconds:.1f} s{summaries}"


def main() -> int:
    options = parse_options()
    gpu_record.check_stage()
    gpu: Gpu | None = None
    no_gpu = ""
    try:
        gpu = find_gpu()
        print(f"{gpu.name}, driver {gpu.driver}, {gpu.memory_mb} MB")
    except NoGpu as reason:
        no_gpu = f"no GPU: {reason}"
        print(no_gpu)
    # A record is of a GPU. Without one, only who asks for it gets it.
    folder = options.out or (Path("results") if gpu else None)
    name = "sanitizers.jsonl" if options.sanitize else "tests.jsonl"
    suites = dict((sanitizer_suites if options.sanitize else test_suites)(options, no_gpu))
    chosen = {
        suite: call
        for suite, call in suites.items()
        if not options.only
        or any(suite == part or (part not in suites and part in suite) for part in options.only)
    }
    record = Record(
        folder / (gpu.slug if gpu else "no-gpu") / name if folder else None,
        gpu,
        replacing=set(chosen) if options.append else None,
        of_tests=True,
    )
    start = time.monotonic()
    outcomes = []
    # Sanitizers mostly wait, for one another least of all; tests have the machine for themselves.
    with ThreadPoolExecutor(options.jobs if options.sanitize else 1) as pool:
        for outcome in pool.map(timed, chosen.values()):
            outcomes.append(outcome)
            record.add(outcome.line())
            print(describe(outcome), flush=True)

    seconds = time.monotonic() - start
    record.close(len(outcomes), round(seconds, 2))
    failed = sum(outcome.failed for outcome in outcomes)
    passed = sum(outcome.passed for outcome in outcomes)
    missed = sum(outcome.skipped for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {missed} skipped, {seconds:.1f} s")
    if record.path:
        print(f"record in {record.path}")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
