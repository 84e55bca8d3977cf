"""Suites parse, and the work in a problem is counted as the documents say."""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tilewise.bench import options, suites
from tilewise.bench.operands import Operands, block_grid, visible
from tilewise.bench.problem import PASSES, BadInput, Problem

MODULES = (
    "problem",
    "suites",
    "implementations",
    "timing",
    "environment",
    "table",
    "charts",
    "profile",
    "profile_all",
    "summary",
    "earlier_figures",
    "run",
    "words",
    "options",
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"tilewise.bench.{module}"))
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("name", suites.names())
def test_suite_parses(name: str) -> None:
    suite = suites.load(name)
    assert suite.about and suite.problems and set(suite.devices) <= {"cpu", "cuda"}
    assert len(set(suite.problems)) == len(suite.problems)
    assert all(problem.suite == name and problem.flops > 0 < problem.bytes for problem in suite.problems)


def test_there_is_a_suite_for_every_purpose() -> None:
    expected = {"quick", "cpu", "ladder", "flash-attention-grid", "vit", "llama", "f32", "head-dims"}
    expected |= {"decode", "sparse", "common-shapes", "gemm", "ffn", "norm", "layer", "deterministic"}
    assert expected <= set(suites.names())
    assert suites.names("cpu") == ["cpu", "cpu-layer", "quick"]
    assert suites.names()[0] == "flash-attention-grid"


@pytest.mark.parametrize(("before", "now"), suites.RENAMED.items())
def test_a_suite_is_found_by_the_name_it_had(before: str, now: str) -> None:
    assert suites.load(before) == suites.load(now) and before not in suites.names()


def test_tables_of_lengths_and_dims_are_complete() -> None:
    """In f32: short and long sequences, one head by its dim, and a whole layer with its parts."""
    plain = [p for p in suites.load("common-shapes").problems if isinstance(p, Problem) and not p.features]
    lengths = {(p.sq, p.direction) for p in plain if (p.b, p.hq, p.d, p.causal) == (1, 8, 64, False)}
    assert lengths == {(2**n, direction) for n in range(7, 13) for direction in ("forward", "backward")}
    heads = {(p.sq, p.d) for p in plain if p.hq == 1 and not p.causal}
    assert heads == {(sq, 2**n) for sq in (1024, 2048, 4096) for n in range(7, 13)}
    for suite, size in (("llama", "sq"), ("ffn", "tokens"), ("layer", "tokens")):
        of = [p for p in suites.load(suite).problems if p.dtype == "f32" and p.direction == "forward"]
        assert {512, 1024, 2048, 4096} <= {getattr(p, size) for p in of}, suite


def test_a_suites_own_limit_has_to_be_a_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for limit in ("soon", 0, True):
        path.write_text(json.dumps({"rows": [{"hq": 1, "sq": 4, "d": 8}], "limit_ms": limit}))
        with pytest.raises(BadInput, match=rf"mine\.json: limit_ms: expected milliseconds, got {limit!r}"):
            suites.load(str(path))
    path.write_text(json.dumps({"rows": [{"hq": 1, "sq": 4, "d": 8}], "limit_ms": 250}))
    assert suites.load(str(path)).limit_ms == 250 and suites.load("vit").limit_ms is None


def test_selection_replaces_the_suites_own_choices() -> None:
    suite = suites.load("quick", suites.Selection(("bf16",), ("both",), (True,)))
    assert {(p.dtype, p.direction, p.causal) for p in suite.problems} == {("bf16", "both", True)}


def test_gradients_may_be_asked_to_be_deterministic() -> None:
    row = {"hq": 1, "sq": 4, "d": 8, "passes": list(PASSES), "deterministic": [False, True]}
    found = suites.expand(row, "mine", suites.Selection())
    asked = {(p.direction, p.deterministic) for p in found if isinstance(p, Problem)}
    both = {(direction, switch) for direction in ("backward", "both") for switch in (False, True)}
    assert asked == both | {("forward", False)}  # which always is
    (one,) = suites.shape("hq=1 sq=4 d=8 deterministic=true", suites.Selection(passes=("backward",)))
    assert one.line()["features"] == "deterministic=true" and str(one).count("deterministic=true") == 1
    (again,) = suites.shape(one.shape_option, suites.Selection(passes=("backward",)))
    assert again == one


def test_the_deterministic_suite_has_every_problem_twice() -> None:
    problems = [p for p in suites.load("deterministic").problems if isinstance(p, Problem)]
    asked = [p for p in problems if p.deterministic]
    assert 10 <= len(asked) <= 14
    assert {replace(p, deterministic=False) for p in asked} == {p for p in problems if not p.deterministic}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hq=8 sq=16", "--shape: expected at least hq, sq and d, got no d"),
        ("hq=8 sq=16 d=0", "--shape: d: expected 1 or above, got 0"),
        ("hq=8 sq=x d=4", "--shape: sq: expected 1 or above, got 'x'"),
        ("hq=8 sq=4 d=4 colour=red", "--shape: expected keys among .*, got 'colour'"),
        ("hq=8 sq=4 d", "--shape: expected key=value, got 'd'"),
        ("hq=8 hkv=3 sq=4 d=4", "--shape: hq: expected a multiple of hkv, got 8 over 3"),
        ("hq=8 sq=4 d=4 mask=odd", "--shape: mask: expected additive or padding, got 'odd'"),
        ("hq=8 sq=4 d=4 blocks=2", "--shape: blocks: expected a number from 0 to 1, got 2"),
        ("hq=8 sq=4 d=4 deterministic=2", "--shape: deterministic: expected a list, got 2"),
    ],
)
def test_bad_shape_is_named(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        suites.shape(text)


def test_bad_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--suite: expected a file, all, or one of .*quick.*, got 'nothing'"):
        suites.load("nothing")
    path = tmp_path / "mine.json"
    path.write_text("{")
    with pytest.raises(BadInput, match=r"--suite: mine\.json is not a suite"):
        suites.load(str(path))
    path.write_text(json.dumps({"rows": [{"hq": 1, "sq": 4, "d": 8, "passes": ["sideways"]}]}))
    with pytest.raises(BadInput, match=r"--suite: mine\.json: passes: expected .*, got 'sideways'"):
        suites.load(str(path))
    path.write_text(json.dumps({"rows": [{"op": ["gemm"]}]}))
    with pytest.raises(BadInput, match=r"--suite: mine\.json: op: expected one of .*, got \['gemm'\]"):
        suites.load(str(path))
    for key in ("devices", "also", "leave_out"):
        for wrong in (3, "cpu", [1]):
            path.write_text(json.dumps({"rows": [{"hq": 1, "sq": 4, "d": 8}], key: wrong}))
            with pytest.raises(BadInput, match=rf"--suite: mine\.json: {key}: expected a list of names"):
                suites.load(str(path))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((options.whole(1), text) for text in ("0", "-3", "1.5", "x", "")),
        *((options.number(0), text) for text in ("-0.1", "nan", "inf", "x", "")),
        *((options.listed(options.whole(1)), text) for text in ("8,0", "8,x")),
    ],
)
def test_bad_numbers_are_told_with_the_option(
    kind: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=kind)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--size={text}"])
    assert "argument --size: expected a" in capsys.readouterr().err


# Work


PLAIN = Problem(b=2, hq=6, hkv=2, sq=32, sk=48, d=8, dv=16)


def test_flops_of_a_plain_problem() -> None:
    forward = 2 * 2 * 6 * 32 * 48 * (8 + 16)
    assert [replace(PLAIN, direction=d).flops for d in PASSES] == [forward, 2.5 * forward, 3.5 * forward]


def test_causal_counts_half() -> None:
    square = replace(PLAIN, sk=32)
    assert replace(square, causal=True).flops == square.flops / 2


def test_a_window_counts_the_pairs_it_keeps() -> None:
    problem = Problem(sq=10, sk=10, d=1, dv=1, window=1)
    assert problem.pairs == 10 + 9 + 9 and problem.flops == 2 * 2 * 28
    assert replace(problem, causal=True).pairs == 10 + 9


def test_bytes_count_every_tensor_once() -> None:
    q, k, v, o = 2 * 6 * 32 * 8, 2 * 2 * 48 * 8, 2 * 2 * 48 * 16, 2 * 6 * 32 * 16
    lse = 4 * 2 * 6 * 32
    assert PLAIN.bytes == 4 * (q + k + v + o) + lse
    assert replace(PLAIN, dtype="bf16").bytes == 2 * (q + k + v + o) + lse
    assert replace(PLAIN, direction="backward").bytes == 2 * 4 * (q + k + v + o) + lse
    assert replace(PLAIN, mask="additive").bytes == PLAIN.bytes + 4 * 32 * 48


@pytest.mark.parametrize(
    "problem",
    [
        Problem(sq=20, sk=20, causal=True),
        Problem(sq=5, sk=20, causal=True, window=3),
        Problem(sq=300, sk=400, window=40),
        Problem(sq=300, sk=400, blocks=0.4),
        Problem(sq=300, sk=300, blocks=0.4, causal=True, window=150),
    ],
)
def test_pairs_are_those_that_are_visible(problem: Problem) -> None:
    seen = visible(problem, torch.device("cpu"))
    assert seen is not None and problem.pairs == seen.sum()
    for i in range(0, problem.sq, 7):
        first, last = problem.keys_of(i)
        outside = torch.cat([seen[i, :first], seen[i, last:]])
        assert not outside.any()


def test_work_is_counted_as_the_cpp_benchmark_counts_it() -> None:
    """What tilewise_bench gave for the same shapes: FLOPs and bytes, from its rate and time."""
    blocks = suites.shape("hq=2 sq=700 d=8 blocks=0.25")[0]
    window = suites.shape("hq=2 sq=300 sk=400 d=8 window=40")[0]
    assert (blocks.flops, blocks.bytes) == (12682240, 184800)
    assert (window.flops, window.bytes) == (1502720, 92000)
    grid = block_grid(blocks, torch.device("cpu"))
    assert bool(grid.diagonal().all()) and not bool(grid.all())


def test_operands_have_the_shapes_of_the_problem() -> None:
    made = Operands.random(
        replace(PLAIN, mask="padding", direction="backward", dtype="f16"), torch.device("cpu")
    )
    assert made.q.shape == (2, 6, 32, 8) and made.v.shape == (2, 2, 48, 16) and made.q.dtype == torch.float16
    assert made.d_o.shape == (2, 6, 32, 16) and made.k.requires_grad
    assert made.mask is not None and made.mask.shape == (2, 1, 1, 48) and made.mask.sum() == 2 * 36
