"""Runs the tests of a staged tree on this machine's GPU and records what came of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gpu_record
from gpu_driver import Gpu, NoGpu, find_gpu
from gpu_programs import Outcome, Suites, python_test, sharded_test, skipped, unit_test
from gpu_property import DOMAINS, property_test
from gpu_record import STAGE, Record
from gpu_sanitizers import sanitizer_suites
from gpu_soak import soak_suites

UNIT_TESTS = ("host_test",)
LARGE = "*CudaLarge*"  # tests of tens of gigabytes
TOLD_APART = (75, 80, 90)  # compute capabilities that have code of their own


def test_suites(options: argparse.Namespace, no_gpu: str, capability: int) -> Suites:
    for program in UNIT_TESTS:
        yield program, partial(unit_test, program, options.timeout)
    yield (
        "cuda_test",
        partial(sharded_test, "cuda_test", options.jobs, LARGE, options.quick, options.timeout),
    )
    for suite, domain in DOMAINS.items():
        there = domain.on(capability)
        if no_gpu or not there:
            yield suite, partial(skipped, suite, no_gpu or domain.reason_against(capability))
        else:
            problems = options.count if options.quick else domain.problems(options.count)
            settings = problems, options.seed, options.jobs, options.timeout
            yield suite, partial(property_test, suite, there, *settings)
    if reason := no_gpu or no_package():
        yield "python", partial(skipped, "python", reason)
    else:
        yield "python", partial(python_test, options.timeout)


def no_package() -> str:
    if not (STAGE / "python/tilewise/_tilewise.so").exists():
        return "the PyTorch package is not in this staged tree"
    return "" if gpu_record.torch_version() else f"no torch in {sys.executable}"


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
    parser.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="random calls on four streams for so long instead: the same bits, and no more memory",
    )
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
    if options.soak is not None and (options.sanitize or not options.soak > 0):
        parser.error("--soak: expected minutes above 0, and not --sanitize")
    return options


def record_name(options: argparse.Namespace, gpu: Gpu | None) -> str:
    """A build that has less code than this GPU can run, made to try older ones, has its own record."""
    name = "soak" if options.soak else "sanitizers" if options.sanitize else "tests"
    if gpu:
        own = int(gpu.compute_capability.replace(".", ""))
        taken_for = gpu_record.capability(gpu)
        if taken_for < max((number for number in TOLD_APART if number <= own), default=own):
            name += f"-sm{taken_for}"
    return f"{name}.jsonl"


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
    kind = soak_suites if options.soak else sanitizer_suites if options.sanitize else test_suites
    suites = dict(kind(options, no_gpu, gpu_record.capability(gpu) if gpu else 0))
    chosen = {
        suite: call
        for suite, call in suites.items()
        if not options.only
        or any(suite == part or (part not in suites and part in suite) for part in options.only)
    }
    record = Record(
        folder / (gpu.slug if gpu else "no-gpu") / record_name(options, gpu) if folder else None,
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
