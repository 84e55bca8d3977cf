"""scripts/gpu_*.py and their records, as far as they need no GPU."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
from tilewise.bench import driver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    names = ("gpu_record", "gpu_programs", "gpu_property", "gpu_sanitizers", "gpu_soak", "gpu_test")
    if not (ROOT / "scripts/gpu_test.py").exists():
        pytest.skip("a staged tree has no sources")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setitem(sys.modules, "gpu_driver", driver)  # its name in a staged tree
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def names_of_cuda_tests() -> set[str]:
    names = set()
    for path in (ROOT / "tests/cuda").rglob("*_test.c*"):
        text = path.read_text()
        found = re.findall(r"INSTANTIATE_TEST_SUITE_P\((\w+),\s*(\w+)", text)
        of_suite = {suite: prefix for prefix, suite in found}
        for kind, suite, name in re.findall(r"^(TEST\w*)\((\w+), (\w+)\)", text, re.MULTILINE):
            names.add(f"{of_suite[suite]}/{suite}.{name}/" if kind == "TEST_P" else f"{suite}.{name}")
    return names


def test_sanitized_tests_are_there(scripts: SimpleNamespace) -> None:
    known = names_of_cuda_tests()
    for families in (scripts.gpu_sanitizers.SANITIZED_TESTS, scripts.gpu_sanitizers.RACECHECKED_TESTS):
        for pattern in (pattern for tests in families.values() for pattern in tests):
            parameter = re.fullmatch(r"(\w+/\w+\.\w+/)\w+", pattern)
            name = parameter[1] if parameter else pattern
            assert fnmatch.filter(known, name), pattern


def test_races_are_not_looked_for_where_copies_are_the_tensor_memory_units(scripts: SimpleNamespace) -> None:
    patterns = [pattern for tests in scripts.gpu_sanitizers.RACECHECKED_TESTS.values() for pattern in tests]
    assert not [pattern for pattern in patterns if re.search("wgmma|mmaf32|wide", pattern, re.IGNORECASE)]


def test_domains_have_their_counts(scripts: SimpleNamespace) -> None:
    counts = {suite: domain.problems(5000) for suite, domain in scripts.gpu_property.DOMAINS.items()}
    assert counts == {
        "property": 5000,
        "property wgmma": 6000,
        "property wgmma f32": 400,
        "property wgmma backward": 400,
        "property wgmma blocks": 500,
        "property wgmma masks": 1000,
        "property wgmma features": 500,
        "property wgmma_halves": 500,
        "property wide_batched": 500,
        "property mma": 5000,
        "property mma f32": 500,
        "property plain": 1000,
        "property pieces": 200,
        "property pieces plain": 200,
        "property strict": 1500,
        "property mma strict": 500,
        "property operations": 2000,
    }


def test_what_kernels_took_is_read_and_summed_up(scripts: SimpleNamespace) -> None:
    output = """40 problems from seed 1
fused took 40 forward, 31 backward, 5 backward again
  of f32 30 forward, 21 backward, 5 backward again
  of bf16 10 forward, 10 backward, 0 backward again
mma took 9 forward, 0 backward, 0 backward again
  of bf16 9 forward, 0 backward, 0 backward again
40 passed, 0 failed
"""
    taken = scripts.gpu_property.Taken()
    taken.read(output)
    taken.read("mma took 1 forward, 1 backward, 1 backward again\n")
    assert taken.line() == {
        "taken": {"fused": {"forward": 40, "backward": 31}, "mma": {"forward": 10, "backward": 1}},
        "taken_of_types": {
            "fused": {"bf16": {"forward": 10, "backward": 10}, "f32": {"forward": 30, "backward": 21}},
            "mma": {"bf16": {"forward": 9, "backward": 0}},
        },
        "backward_again": {"fused": 5, "mma": 1},
    }


def test_named_tests_that_are_all_skipped_are_missed(scripts: SimpleNamespace) -> None:
    report = ElementTree.fromstring(
        """<testsuites><testsuite>
<testcase name="Runs" classname="A"/>
<testcase name="Fails" classname="A"><failure message="no"/></testcase>
<testcase name="Is/0" classname="P/B"><skipped message="b.cpp:1&#x0A;too small&#x0A;"/></testcase>
<testcase name="Is/1" classname="P/B"/>
<testcase name="Is/wgmma" classname="P/C"><skipped message="c.cpp:1&#x0A;too small&#x0A;"/></testcase>
<testcase name="Is" classname="D"><skipped message="d.cpp:1&#x0A;needs compute capability 9.0"/></testcase>
<testcase name="Is" classname="F"><skipped message="f.cpp:1&#x0A;no Hopper GPU"/></testcase>
<testcase name="Is" classname="G"><skipped message="g.cpp:1&#x0A;has no code for sm_90a"/></testcase>
</testsuite></testsuites>"""
    )
    patterns = ["A.*", "P/B.Is*", "P/B.Is/0", "P/C.Is/wgmma", "D.Is", "E.IsNotThere", "F.Is", "G.Is"]
    tests = scripts.gpu_sanitizers.NamedTests.of(patterns, report.iter("testcase"))
    assert tests.ran == 2
    assert tests.skipped == {
        "P/B.Is/0": "too small",
        "P/C.Is/wgmma": "too small",
        "D.Is": "needs compute capability 9.0",
        "F.Is": "no Hopper GPU",
        "G.Is": "has no code for sm_90a",
    }
    assert tests.missed == ["P/B.Is/0", "P/C.Is/wgmma", "E.IsNotThere"]


def test_slow_tools_have_fewer_problems(scripts: SimpleNamespace) -> None:
    options = argparse.Namespace(sanitize_count=40, seed=1)
    counts = {
        tool: [
            int(arguments[-1].removeprefix("--count="))
            for name, arguments in scripts.gpu_sanitizers.sanitized_programs(tool, options).items()
            if name.startswith("tilewise_property")
        ]
        for tool in scripts.gpu_sanitizers.SANITIZERS
    }
    # The whole contract, plain, wgmma and its backward (not for races), mma, mma in f32.
    assert counts == {
        "memcheck": [40, 16, 8, 2, 8, 8],
        "racecheck": [10, 4, 2, 2],
        "initcheck": [20, 8, 4, 1, 4, 4],
        "synccheck": [40, 16, 8, 2, 8, 8],
    }


def test_memory_is_checked_with_padding_between_allocations(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer = tmp_path / "bin/compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/asked\necho 3 passed, 0 failed\n'
        "echo ========= ERROR SUMMARY: 0 errors\n"
    )
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sanitizer.parent}:/usr/bin:/bin")
    monkeypatch.setattr(scripts.gpu_programs, "STAGE", tmp_path)
    for tool, padding in (("memcheck", "--padding=65536 "), ("initcheck", "")):
        line = scripts.gpu_sanitizers.sanitize("a suite", tool, "a_program", ["--count=3"], 10).line()
        asked = f"--tool={tool} {padding}--error-exitcode=99"
        assert (tmp_path / "asked").read_text() == f"{asked} bin/a_program --count=3\n"
        assert (line["passed"], " ".join(line["options"]), line["ran"]) == (1, asked, 3)


def test_a_record_ends_with_its_sums(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "SOURCES.sha256").write_text("sources")
    (tmp_path / "BUILD.json").write_text("{}")
    monkeypatch.setattr(scripts.gpu_record, "STAGE", tmp_path)
    path = tmp_path / "gpu/tests.jsonl"
    record = scripts.gpu_record.Record(path, None)
    for suite in ("a", "b"):
        record.add(scripts.gpu_programs.Outcome(suite, passed=3, skipped=1).line())
    record.close(2, 7.5)
    record = scripts.gpu_record.Record(path, None, replacing={"b"})
    record.add(scripts.gpu_programs.Outcome("b", passed=5, failed=1).line())
    record.close(1, 2.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("suite") for line in lines] == [None, "a", "b", None]
    assert lines[-1] == {
        "total": {"suites": 2, "passed": 8, "failed": 1, "skipped": 1},
        "run": {"suites": 1, "seconds": 2.0},
    }


@pytest.mark.parametrize(
    ("architectures", "capability", "name"),
    [
        ("75-virtual;80-real;90-real;90-virtual", "9.0", "tests.jsonl"),
        ("75-virtual;80-real;90-real;90-virtual", "8.6", "tests.jsonl"),
        ("75-virtual;80-real;90-real;90-virtual", "12.0", "tests.jsonl"),
        ("90-real", "9.0", "tests.jsonl"),
        ("80-virtual", "9.0", "tests-sm80.jsonl"),
        ("75-virtual", "9.0", "tests-sm75.jsonl"),
        ("75-virtual", "8.9", "tests-sm75.jsonl"),
        ("75-virtual", "7.5", "tests.jsonl"),
        ("native", "9.0", "tests.jsonl"),
    ],
)
def test_a_build_for_older_gpus_has_a_record_of_its_own(
    scripts: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architectures: str,
    capability: str,
    name: str,
) -> None:
    (tmp_path / "BUILD.json").write_text(json.dumps({"architectures": architectures}))
    monkeypatch.setattr(scripts.gpu_record, "STAGE", tmp_path)
    gpu = driver.Gpu("A GPU", capability, 1, 1.0, 1, "", "")
    options = argparse.Namespace(soak=None, sanitize=False)
    assert scripts.gpu_test.record_name(options, gpu) == name
    assert scripts.gpu_test.record_name(options, None) == "tests.jsonl"


@pytest.mark.parametrize(
    ("architectures", "own", "taken_for"),
    [
        ("75-virtual;80-real;90-real;90-virtual", "9.0", 90),
        ("75-virtual;80-real;90-real;90-virtual", "8.9", 80),
        ("75-virtual;80-real;90-real;90-virtual", "12.0", 120),
        ("75-virtual;80-real", "9.0", 75),  # machine code of another generation does not run
        ("75;80-real", "9.0", 75),
        ("75-virtual", "7.5", 75),
        ("80-virtual", "9.0", 80),
        ("90-real", "9.0", 90),
        ("native", "8.6", 86),
    ],
)
def test_a_gpu_is_taken_for_what_the_build_has_code_of(
    scripts: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architectures: str,
    own: str,
    taken_for: int,
) -> None:
    (tmp_path / "BUILD.json").write_text(json.dumps({"architectures": architectures}))
    monkeypatch.setattr(scripts.gpu_record, "STAGE", tmp_path)
    assert scripts.gpu_record.capability(driver.Gpu("A GPU", own, 1, 1.0, 1, "", "")) == taken_for


def outcomes_without_a_gpus_work(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capability: int
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """By suite, the arguments of the property tests that run, and why others are skipped."""

    def property_test(suite: str, domain: SimpleNamespace, *settings: int) -> SimpleNamespace:
        return scripts.gpu_programs.Outcome(suite, passed=1, more={"arguments": domain.arguments})

    monkeypatch.setattr(scripts.gpu_test, "property_test", property_test)
    options = argparse.Namespace(timeout=1, jobs=1, quick=True, count=1, seed=1)
    calls = dict(scripts.gpu_test.test_suites(options, "", capability))
    outcomes = {suite: calls[suite]() for suite in scripts.gpu_property.DOMAINS}
    ran = {suite: list(of.more["arguments"]) for suite, of in outcomes.items() if of.passed}
    missing = {suite: of.more["skipped_because"][0] for suite, of in outcomes.items() if of.skipped}
    return ran, missing


def test_domains_without_their_kernels_are_skipped(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains = scripts.gpu_property.DOMAINS
    ran, missing = outcomes_without_a_gpus_work(scripts, monkeypatch, 90)
    assert not missing
    assert ran == {suite: list(domain.arguments) for suite, domain in domains.items()}

    hoppers = {"property wgmma", "property wgmma f32", "property wgmma backward", "property wgmma blocks",
               "property wgmma masks", "property wgmma features",
               "property wgmma_halves", "property wide_batched"}  # fmt: skip
    for capability in (80, 86, 120):
        ran, missing = outcomes_without_a_gpus_work(scripts, monkeypatch, capability)
        assert set(missing) == hoppers
        assert ran["property pieces plain"] == ["--pieces", "--domain=plain", "--kernel=mma"]
        assert ran["property mma"] == list(domains["property mma"].arguments)

    ran, missing = outcomes_without_a_gpus_work(scripts, monkeypatch, 75)
    assert set(missing) == hoppers | {"property mma", "property mma strict", "property pieces plain"}
    assert missing["property mma strict"] == "mma, widened: not for compute capability 7.5"
    assert ran["property pieces"] == ["--pieces", "--kernel=fused"]
    assert ran["property mma f32"] == ["--domain=mma-f32", "--kernel=fused"]
    assert ran["property"] == []


def test_sanitizers_leave_out_domains_without_their_kernels(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sanitize(suite: str, *arguments: object) -> SimpleNamespace:
        return scripts.gpu_programs.Outcome(suite, passed=1)

    monkeypatch.setattr(scripts.gpu_sanitizers, "sanitize", sanitize)
    monkeypatch.setattr(scripts.gpu_sanitizers.shutil, "which", lambda name: name)
    options = argparse.Namespace(sanitize_count=40, seed=1, timeout=1)
    for capability, lacking in (
        (90, set()),
        (80, {"wgmma", "wgmma backward"}),
        (75, {"wgmma", "wgmma backward", "mma"}),
    ):
        calls = dict(scripts.gpu_sanitizers.sanitizer_suites(options, "", capability))
        missing = {suite for suite, call in calls.items() if call().skipped}
        assert missing == {f"{tool} tilewise_property {name}" for name in lacking
                           for tool in scripts.gpu_sanitizers.SANITIZERS
                           if not (tool == "racecheck" and "wgmma" in name)}  # fmt: skip


def test_a_ring_is_timed_beside_one_call(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "SOURCES.sha256").write_text("sources")
    (tmp_path / "BUILD.json").write_text("{}")
    monkeypatch.setattr(scripts.gpu_record, "STAGE", tmp_path)
    monkeypatch.delitem(sys.modules, "gpu_context_parallel", raising=False)
    program = importlib.import_module("gpu_context_parallel")
    monkeypatch.setattr(program, "CPU_SECONDS", 0.0)
    monkeypatch.setattr(program, "SIZES", (1, 2, 4))
    operators = program.pieces._forward, program.pieces._backward
    program.main(["--device", "cpu", "--out", str(tmp_path)])
    assert (program.pieces._forward, program.pieces._backward) == operators

    environment, *lines = map(
        json.loads, (tmp_path / "no-gpu/context-parallel.jsonl").read_text().splitlines()
    )
    assert list(environment) == ["environment"]
    passes = ("forward", "forward and backward")
    assert [(line["ranks"], line["pass"]) for line in lines] == [(n, x) for n in (1, 2, 4) for x in passes]
    for line in lines:
        assert (line["s"], line["dtype"]) == (64, "bf16")
        assert min(line[name] for name in ("whole_ms", "ring_ms", "merging_ms", "ring_16_bit_ms")) > 0
    for line in lines[::2]:  # keys of other ranks arrived where they belong; rounding of pieces shows
        assert line["ring_error"] <= 1.05 * line["whole_error"] < 0.01
        assert line["ring_16_bit_error"] > line["ring_error"] or line["ranks"] == 1


SOAKED = {"seed": 1, "calls": {"direct": 5, "graph": 4}, "problems": {"fused": 3}, "device_mb": [7.5, 7.5]}


@pytest.mark.parametrize(
    ("closing", "status", "passed", "failures"),
    [
        (json.dumps(SOAKED | {"failures": []}), 0, 9, []),
        (json.dumps(SOAKED | {"failures": ["other bits"]}), 1, 8, ["other bits"]),
        ("terminate called", 134, 0, ["it ended without its closing line"]),
        ("7", 0, 0, ["it ended without its closing line"]),
        (json.dumps(SOAKED | {"failures": []}), 1, 9, []),
    ],
)
def test_a_soak_is_read_from_its_closing_line(
    scripts: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    closing: str,
    status: int,
    passed: int,
    failures: list[str],
) -> None:
    program = tmp_path / "bin/tilewise_soak"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho \"$@\" >{tmp_path}/asked\necho a round\necho '{closing}'\nexit {status}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(scripts.gpu_programs, "STAGE", tmp_path)
    suites = dict(scripts.gpu_soak.soak_suites(argparse.Namespace(soak=0.5, seed=3), "", 90))
    line = suites["soak"]().line()
    assert (tmp_path / "asked").read_text() == "--seconds=30 --seed=3\n"
    assert (line["passed"], line["failures"], line["exit_status"]) == (passed, failures, status)
    assert (line["failed"] > 0) == (status != 0 or bool(failures))
    if passed:
        assert line["device_mb"] == [7.5, 7.5]
    missing = dict(scripts.gpu_soak.soak_suites(argparse.Namespace(soak=0.5, seed=3), "no GPU", 0))
    assert missing["soak"]().skipped == 1
