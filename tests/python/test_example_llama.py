"""examples/llama: the whole model beside Hugging Face's, and what its script prints."""

from __future__ import annotations

import doctest
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_within_contract
from programs import example
from tilewise.bench.problem import BadInput
from torch._dynamo.utils import counters

CPU = torch.device("cpu")


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from example(monkeypatch, "llama", "model", "routes", "compare")


@pytest.fixture
def pair(llama: Any) -> tuple[Any, Any]:
    """Ours and Hugging Face's, with the same weights."""
    pytest.importorskip("transformers")
    config = llama.model.MODELS["tiny"]
    theirs = llama.routes.hugging_face(config, "eager", CPU, torch.float32)
    with torch.no_grad():  # larger than they begin, so that tokens differ
        for parameter in theirs.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    ours = llama.model.Llama(config).requires_grad_(False).eval()
    ours.load_hugging_face(theirs)
    return ours, theirs


@torch.no_grad()
def test_logits_are_hugging_faces(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    tokens = torch.randint(128, (2, 21))
    found, math = ours(tokens), theirs(tokens).logits[:, -1]
    assert_within_contract("logits", found, theirs.double()(tokens).logits[:, -1], math)


@torch.no_grad()
def test_generation_is_hugging_faces(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    prompt = torch.randint(128, (2, 9))
    expected = theirs.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert torch.equal(ours.generate(prompt, 12), expected[:, 9:])


@torch.no_grad()
def test_all_routes_decode_the_same_tokens(llama: Any, pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    for parameter in theirs.parameters():  # larger still, so that no token comes again and again
        parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    ours.load_hugging_face(theirs)
    prompt = torch.randint(128, (2, 9))
    routes = [
        llama.routes.OurDecoding(ours, prompt, 5, graph=False),
        *(llama.routes.TheirDecoding(theirs, name, prompt) for name in ("sdpa", "eager", "tilewise")),
        llama.routes.TheirCompiledDecoding(theirs, prompt, 5),
    ]
    assert routes[-1].compilations() == {"compiled_graphs": 1}
    seen = set()
    for steps in (5, 1, 2, 3, 4, 5):
        found = set()
        for route in routes:
            route.reset()
            found.add(tuple(route.run(steps).flatten().tolist()))
        assert len(found) == 1, f"after {steps} steps"
        seen |= found
    assert len(seen) > 2, "all steps gave the same token"
    assert routes[-1].compilations() == {"compiled_graphs": 1}, "a turn of the others made it compile again"


def test_a_static_cache_of_another_kind_is_said(llama: Any) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=r"^--against compiled: .* has no tensor cumulative_length") as error:
        llama.routes.length_of(SimpleNamespace(cumulative_length=3))
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_what_makes_ready_is_outside_of_the_clock(
    llama: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, theirs = pair
    events: list[str] = []
    chosen = type(theirs).set_attn_implementation

    def choose(model: Any, name: str) -> None:
        events.append("choose")
        chosen(model, name)

    def clock() -> float:
        events.append("clock")
        return 0.0

    monkeypatch.setattr(type(theirs), "set_attn_implementation", choose)
    monkeypatch.setattr(llama.compare, "time", SimpleNamespace(perf_counter=clock))
    tokens = torch.randint(128, (1, 8))
    calls = {"prefill": llama.routes.their_prefill(theirs, "sdpa", tokens)}
    for name in ("sdpa", "eager"):
        route = llama.routes.TheirDecoding(theirs, name, tokens)
        calls[name] = llama.routes.Call(lambda of=route: of.run(2), route.reset)
    events.clear()
    llama.compare.race(calls, CPU, 2)
    rounds, turns = 2, len(calls)  # those that warm up begin to look at the clock, too
    warm_up, timed = (["choose", *["clock"] * looks] * turns * rounds for looks in (1, 2))
    assert events == warm_up + timed


@torch.no_grad()
@pytest.mark.parametrize("page_size", [None, 4])
def test_caches_give_what_the_whole_gives(llama: Any, page_size: int | None) -> None:
    model = llama.model.Llama(llama.model.MODELS["tiny"])
    tokens = torch.randint(128, (2, 11))
    caches = model.make_caches(2, 16, page_size)
    for part in tokens.split((6, 1, 1, 3), dim=1):
        found = model(part, caches)
    assert torch.allclose(found, model(tokens), atol=1e-5)


def test_sizes_are_the_published_ones(llama: Any) -> None:
    billions = {"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98}
    for name, expected in billions.items():
        model = llama.model.Llama(llama.model.MODELS[name], device="meta")
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(expected, abs=0.01)


def check_table(printed: str) -> None:
    """Of two prefills and one decoding, four routes each: figures stand under the names of their columns."""
    lines = printed.splitlines()
    assert lines[0].startswith("tiny: layers 2, float32, batch 1, ") and lines[0].endswith(" on cpu")
    assert re.match(r"logits, .*: tilewise \d\.\de-\d\d \(same token\), hf eager ", lines[1])
    heads = [line for line in lines if line.endswith("peak MB")]
    assert [line.split("  ")[0] for line in heads] == ["prefill", "decode, one step"]
    rows = [line for line in lines if re.match(r" +\d+  \w", line)]
    assert len(rows) == 12 and len(lines) == 16
    assert {len(line) for line in (*heads, *rows)} == {len(heads[0])}


def test_script_compares_on_the_cpu(llama: Any, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("transformers")
    given = ["--model", "tiny", "--prefill", "16,32", "--decode", "3", "--context", "8", "--runs", "2"]
    given += ["--decode-runs", "3"]
    against = ["--against", "sdpa,eager,tilewise", "--device", "cpu", "--out", str(tmp_path)]
    llama.compare.main([*given, *against])
    check_table(capsys.readouterr().out)
    (path,) = tmp_path.rglob("llama-model.jsonl")
    first, *lines, last = (json.loads(line) for line in path.read_text().splitlines())
    assert first["environment"]["device"] == "cpu" and "finished" in last
    impls = {"tilewise", "hf sdpa", "hf eager", "hf tilewise"}
    assert {(x["impl"], x["tokens"]) for x in lines if x["op"] == "prefill"} == {
        (impl, tokens) for impl in impls for tokens in (16, 32)
    }
    assert {x["impl"] for x in lines if x["op"] == "decode"} == impls
    (logits,) = (x for x in lines if x["op"] == "logits")
    assert logits["relative_difference"] < 1e-5 and logits["same_token"]
    assert logits["eager_relative_difference"] < 1e-5 and logits["eager_same_token"]
    timed = [x for x in lines if x["op"] != "logits"]
    assert all(x["tokens_a_second"] > 0 and x["peak_mb"] > 0 and x["spread"] >= 0 for x in timed)
    assert all(x["runs"] == (2 if x["op"] == "prefill" else 3) for x in timed)
    # Two layers' keys and values of 8 tokens and 3 more, two heads of 16, f32.
    assert all(x["peak_mb"] > 2 * 2 * 11 * 2 * 16 * 4e-6 for x in timed if x["op"] == "decode")


def test_compiled_layers_are_compiled_before_their_memory_is_taken(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    graphs: list[tuple[int, int]] = []  # compiled before and after each call whose memory is taken

    def peak_bytes(call: Any, device: torch.device) -> int:
        before = counters["stats"]["unique_graphs"]
        call()
        graphs.append((before, counters["stats"]["unique_graphs"]))
        return 7_000_000

    counters.clear()
    monkeypatch.setattr(llama.compare, "peak_bytes", peak_bytes)
    given = ["--model", "tiny:1", "--prefill", "16", "--decode", "4", "--context", "8", "--runs", "2"]
    asked = llama.compare.arguments([*given, "--against", "compiled", "--dtype", "float32"])
    with torch.inference_mode():
        lines = list(llama.compare.measure(llama.compare.base_line("tiny:1", asked, CPU), asked, CPU))
    assert graphs[0] == (0, 0) and graphs[1][0] > 0, "the layer was not compiled"
    assert all(before == after for before, after in graphs), "a call whose memory was taken compiled"
    found = {(x["op"], x["impl"]): x for x in lines if x["op"] != "logits"}
    assert {impl for op, impl in found if op == "prefill"} == {
        "tilewise",
        "hf sdpa, compiled",
        "tilewise, beside it",
    }
    assert found["prefill", "hf sdpa, compiled"]["peak_mb"] == 7.0
    step = found["decode", "hf sdpa, compiled"]
    assert step["runs"] == 5 and step["compiled_graphs"] == 1
    # One layer's keys and values of 8 tokens and 4 more, two heads of 16, f32.
    assert step["peak_mb"] == pytest.approx(7.0 + 2 * 12 * 2 * 16 * 4e-6)
    # An embedding and a head of 128 tokens and the last norm, 64 wide.
    assert step["weights_mb"] - step["layers_mb"] == pytest.approx((2 * 128 + 1) * 64 * 4e-6)


@pytest.mark.parametrize("against", ["compiled", "sdpa,compiled"])
def test_a_failing_compiler_leaves_the_other_routes(
    llama: Any, monkeypatch: pytest.MonkeyPatch, against: str
) -> None:
    pytest.importorskip("transformers")

    def no_compiler(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no working compiler\nset CC")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", no_compiler)
    undone: list[Any] = []

    def undo_compilation(theirs: Any) -> None:
        undone.append(theirs)
        llama.routes.undo_compilation(theirs)

    monkeypatch.setattr(llama.compare, "undo_compilation", undo_compilation)
    given = ["--model", "tiny:1", "--prefill", "16,24", "--decode", "2", "--context", "8", "--runs", "2"]
    asked = llama.compare.arguments([*given, "--against", against, "--dtype", "float32"])
    torch._dynamo.reset()
    with torch.inference_mode():
        lines = list(llama.compare.measure(llama.compare.base_line("tiny:1", asked, CPU), asked, CPU))
    skipped = [x for x in lines if "skipped" in x]
    assert [(x["op"], x.get("tokens")) for x in skipped] == [
        ("prefill", 16),
        ("prefill", 24),
        ("decode", None),
    ]
    for line in skipped:
        assert line["impl"] == "hf sdpa, compiled" and "ms" not in line
        assert "no working compiler" in line["skipped"] and "\n" not in line["skipped"]
    plain = {"tilewise"} | {f"hf {name}" for name in against.split(",") if name != "compiled"}
    timed = [(x["op"], x["impl"]) for x in lines if "ms" in x]
    assert sorted(timed) == sorted((op, x) for op in ("prefill", "prefill", "decode") for x in plain)
    assert len(undone) == 3


def test_a_fault_of_the_device_is_no_failing_compiler(llama: Any) -> None:
    for fault in (torch.AcceleratorError("CUDA error: an illegal memory access"), BadInput("--against")):

        def compiling(fault: Exception = fault) -> None:
            raise fault

        with pytest.raises(type(fault)):
            llama.compare.why_not(compiling)
    assert llama.compare.why_not(lambda: None) is None


def test_append_keeps_other_models_of_the_same_environment(llama: Any, tmp_path: Path, capsys: Any) -> None:
    small = ["--prefill", "8", "--decode", "0", "--context", "4", "--runs", "2", "--device", "cpu"]
    small += ["--against", "", "--out", str(tmp_path)]

    def depths(*given: str) -> list[int]:
        llama.compare.main([*small, *given])
        (path,) = tmp_path.rglob("llama-model.jsonl")
        first, *lines, last = (json.loads(line) for line in path.read_text().splitlines())
        assert "environment" in first and "finished" in last
        return [x["layers"] for x in lines]

    with pytest.raises(BadInput, match=r"^--append: expected a record to keep, got .*llama-model\.jsonl"):
        depths("--model", "tiny:1", "--append")
    assert not list(tmp_path.iterdir())
    assert depths("--model", "tiny:1") == [1]
    assert depths("--model", "tiny,tiny:3", "--append") == [1, 2, 3]
    assert depths("--model", "tiny:1", "--append") == [2, 3, 1]
    (path,) = tmp_path.rglob("llama-model.jsonl")
    before = path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"')
    path.write_text(before)
    with pytest.raises(
        BadInput, match=r"--append: .* was made with torch 1\.0.*: give --out a folder without"
    ):
        depths("--model", "tiny:1", "--append")
    assert path.read_text() == before
    assert depths("--model", "tiny:1") == [1]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model="], "--model: expected some of llama-2-7b, llama-2-13b, llama-2-70b, tiny, got ''"),
        (["--model=,"], "got ','"),
        (["--append"], "--append: expected --out with it"),
        (["--model=tiny:x"], "--model: expected a number of layers after tiny:, got 'x'"),
        (["--model=tiny:0"], "--model: expected a number of layers after tiny:, got '0'"),
        (["--prefill=8,x"], "--prefill: expected a whole number"),
        (["--prefill=8,0"], "--prefill: expected a whole number"),
        (["--decode=-1"], "--decode: expected a whole number"),
        (["--context=0"], "--context: expected a whole number"),
        (["--batch=0"], "--batch: expected a whole number"),
        (["--runs=0"], "--runs: expected a whole number"),
        (["--decode-runs=1"], "--decode-runs: expected a whole number"),
        (["--dtype=f8"], "--dtype: invalid choice"),
        (["--prefill=5000"], "--prefill: expected at most 4096, the positions of llama-2-7b, got 5000"),
        (["--context=4096"], "got 4096 and 64 steps of --decode"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_bad_options_are_named(llama: Any, given: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        llama.compare.main([*given, "--device", "cpu"])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_append_names_other_sources_before_the_binary_they_made(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "llama-model.jsonl"
    there = {"binary": "b0", "sources": "0" * 64}
    path.write_text(json.dumps({"environment": there}) + "\n")
    assert llama.compare.kept_lines(path, there, []) == []
    with pytest.raises(BadInput) as error:
        llama.compare.kept_lines(path, {"binary": "b1", "sources": "1" * 64}, [])
    differ = f"was made with sources {'0' * 16}..., and here it is {'1' * 16}..."
    assert str(error.value) == f"--append: {path} {differ}: give --out a folder without an older record"


@pytest.mark.parametrize("content", ["", "{", "3", '{"environment": 3}', '{"environment": {}}\n{}'])
def test_a_damaged_record_is_one_line(llama: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "llama-model.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"--append: .* is no record of this program") as error:
        llama.compare.kept_lines(path, {}, [])
    assert "\n" not in str(error.value)


def test_its_words_are_true(llama: Any) -> None:
    for module in (llama.routes, llama.compare):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


def test_script_says_what_is_missing(llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    small = ["--model", "tiny", "--prefill", "8", "--decode", "2", "--context", "4", "--runs", "2"]
    with pytest.raises(SystemExit, match=r"pip install transformers.*\(import of transformers halted"):
        llama.compare.main([*small, "--device", "cpu"])
    llama.compare.main([*small, "--device", "cpu", "--against", ""])
    assert re.search(r"^ +8  tilewise +\d+\.\d{3} ", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit):
        llama.compare.main(["--model", "llama-9"])
    assert "--model: expected some of llama-2-7b" in capsys.readouterr().err
