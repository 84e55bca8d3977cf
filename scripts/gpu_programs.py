"""Running the programs of a staged tree, and reading what came of their tests."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_record import STAGE

SLOWEST = 3  # tests that a record names

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


Suites = Iterator[tuple[str, Callable[[], Outcome]]]


def skipped(suite: str, reason: str) -> Outcome:
    return Outcome(suite, skipped=1, more={"skipped_because": [reason]})


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


def reason_of(message: str) -> str:
    """Of a skipped test: the line after that of the place, without where the test stood."""
    lines = message.partition("Google Test trace:")[0].strip().splitlines()
    return lines[-1] if lines else "no reason"
