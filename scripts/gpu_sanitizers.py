"""compute-sanitizer's tools: what runs under them and what they find. All is many times as slow there."""

from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpu_programs import Outcome, Suites, reason_of, run, run_reporting, show_failure, skipped
from gpu_property import DOMAINS, Taken

OTHER_GPU = "compute capability|no code for|no Hopper GPU"  # what skipped tests say
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
FEWER_IN_DOMAINS = 5
# Of mma's problems in f32 two must do, since racecheck has no more: one packed, of a head dim to 64, one with
# key lengths and a larger one, both with a sequence that mma leaves to fused and one that it does not.
F32_SEED = 137
FEWER_OF_TOOL = {"racecheck": 4, "initcheck": 2}  # the slowest
# Between allocations, so that an access past the end of one is not inside the next.
OPTIONS = {"memcheck": ("--padding=65536",)}
# It does not see that copies of the tensor memory unit are waited for, so it is for kernels without: not for
# wgmma, and not for wide, whose products may be wgmma's.
RACECHECKED = ("naive", "tiled", "fused", "mma")
CONTRACT = "Kernels/EveryKernel.IsWithinTheContractInItsTypesAndPasses/"
TF32 = "Kernels/EveryKernel.StaysNearFullPrecisionWhereTf32IsAllowed/"
FUSED_TILES = "TypesAndBands/FusedTiles.OfHeadDimsTo"
# Small tests of every kind of kernel: under a sanitizer all of cuda_test takes too long. A family has a
# process for itself. A name, or a pattern, of which no test runs is a failure.
SANITIZED_TESTS = {
    "parts": ("CudaTiles.*", "CudaKeyGrid.*", "CudaSoftmax.*", "CudaLaunch.*", "Matrices.*"),
    "simt": (
        *(f"{test}{kernel}" for test in (CONTRACT, TF32) for kernel in ("naive", "tiled", "fused")),
        "FusedShort.IsWithinTheContract",
    ),
    "tiles": (f"{FUSED_TILES}*",),
    "peaks": (
        "Kernels/Peaks.OfFewKeysAreExact/fused",
        "Kernels/Peaks.OfFewKeysInManyTilesAreExact/fused",
    ),
    "mma": (
        *(f"{test}mma" for test in (CONTRACT, TF32)),
        "MmaForward.OfFewTilesIsWithinTheContract",
        "MmaForward.InPartsOfKeysIsWithinTheContract",
        "MmaDecode.IsWithinTheContract",
        "MmaDecode.OfPagesIsWithinTheContract",
        "MmaBackward.GivesEachGradientWithoutTheOthers",
        "MmaBackward.IsWithinTheContractAtOddHeadDims",
        "MmaF32.OfAWindowIsWithinTheContract",
        "Kernels/Peaks.OfFewKeysAreExact/mma",
    ),
    "wgmma": (
        *(f"{test}wgmma" for test in (CONTRACT, TF32)),
        "WgmmaForward.TakesOtherHeadDimsOfValues",
        "WgmmaForward.TakesRowsOfAlignedStrides",
        "WgmmaForward.TakesDropout",
        "WgmmaForward.JoinsSharesOfKeys",
    ),
    "wide": (f"{CONTRACT}wide",),
    "layer": (
        "CudaGemm.SimtIsNearTheTruth",
        "CudaGemm.MmaIsNearTheTruthForAnyStrides",
        "CudaGemm.WgmmaIsNearTheTruthAroundItsTiles",
        "CudaGemm.OneRowIsNearTheTruthWithFewSummandsAndMany",
        "CudaGemm.SplitFactorsKeepTheErrorOfF32",
        "CudaFfn.FewTokensAreNearTheTruth",
        "CudaNorm.BothPassesAreNearTheTruthForEveryType",
        "CudaNormRing.GradientsOfEveryLengthAreNearTheTruth",
        "CudaRope.EveryFormIsNearTheTruth",
    ),
    # Garbage in index tensors. The test of a kernel makes a forward of each of 250 problems, and a backward
    # where the kernel has one for it; with fewer problems it fails. That of rope makes 300 calls.
    **{
        f"garbage {kernel}": (f"Kernels/GarbageIndices.KeepKernelsInsideTheirAllocations/{kernel}",)
        for kernel in ("naive", "tiled", "fused", "mma", "wgmma")
    },
    "garbage wgmma backward": ("GarbageGradients.StayInsideTheirTensors",),  # also 250
    "garbage rope": ("GarbageRope.WritesInsideTheCachesAlone", "CheckedIndices.*"),
}
RACECHECKED_TESTS = {
    "parts": ("Matrices.*",),
    "simt": (
        *(f"{CONTRACT}{kernel}" for kernel in ("naive", "tiled", "fused")),
        "FusedShort.IsWithinTheContract",
    ),
    "tiles": tuple(
        f"{FUSED_TILES}{dim}AreWithinTheContract/{dtype}" for dim in (64, 128) for dtype in ("f32", "bf16")
    ),
    "peaks": (
        "Kernels/Peaks.AreMended/fused",
        "Kernels/Peaks.OfFewKeysAreExact/fused",
        "Kernels/Peaks.OfFewKeysInManyTilesAreExact/fused",
    ),
    "mma": (
        f"{CONTRACT}mma",
        "MmaForward.OfFewTilesIsWithinTheContract",
        "MmaBackward.GivesEachGradientWithoutTheOthers",
        "MmaBackward.InOrderIsWithinTheContractWhereAllLookAtTheSameKeys",
        "Kernels/Peaks.AreMended/mma",
        "Kernels/Peaks.OfFewKeysAreExact/mma",
    ),
    "layer": ("CudaGemm.SimtIsNearTheTruth", "CudaNorm.BothPassesAreNearTheTruthForEveryType"),
}


def sanitizer_suites(options: argparse.Namespace, no_gpu: str, capability: int) -> Suites:
    nothing_runs = no_gpu or (
        "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the PATH"
    )
    for tool in SANITIZERS:
        for name, arguments in sanitized_programs(tool, options).items():
            suite = f"{tool} {name}"
            domain = DOMAINS.get(name.replace("tilewise_property", "property"))
            lacking = domain and not domain.on(capability)
            if reason := nothing_runs or (domain.reason_against(capability) if lacking else ""):
                yield suite, partial(skipped, suite, reason)
            else:
                yield suite, partial(sanitize, suite, tool, name.split()[0], arguments, options.timeout)


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
        "tilewise_property wgmma backward": [
            *problems,
            *DOMAINS["property wgmma backward"].arguments,
            f"--count={max(1, few // 4)}",  # they are large
        ],
        "tilewise_property mma": [*problems, *DOMAINS["property mma"].arguments, f"--count={few}"],
        "tilewise_property mma f32": [*f32, f"--count={few}"],
    }
    if races:
        del programs["tilewise_property wgmma"], programs["tilewise_property wgmma backward"]
    for family, tests in (RACECHECKED_TESTS if races else SANITIZED_TESTS).items():
        programs[f"cuda_test {family}"] = [f"--gtest_filter={':'.join(tests)}", "--gtest_brief=1"]
    return programs


def sanitize(suite: str, tool: str, program: str, arguments: list[str], timeout: float) -> Outcome:
    """One of compute-sanitizer's tools over a program. What passes is the program under it, so 1 or 0. Where
    it ran no problem, or none of the tests of a pattern, something was not checked."""
    options = (f"--tool={tool}", *OPTIONS.get(tool, ()), "--error-exitcode=99")
    command = ["compute-sanitizer", *options, f"bin/{program}", *arguments]
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
        more={"tool": tool, "options": options, "arguments": arguments}
        | {"summary": summaries, "exit_status": status}
        | found,
    )


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
        # A kernel for another GPU, or one that this build lacks, is nothing that a list can mend.
        excused = {name for name, reason in tests.skipped.items() if re.search(OTHER_GPU, reason)}
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
