"""bench/text_models.py: what it prints and records, with small models in the place of real shapes."""

from __future__ import annotations

import doctest
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import EXAMPLES, load
from tilewise.bench.problem import BadInput

pytest.importorskip("transformers")
models = load("bench/text_models.py")

# Says the same of every sentence, whatever the model.
FAKE = """#!{python}
import os, sys
lines = sys.stdin.read().splitlines()
if "SAID" in os.environ:
    open(os.environ["SAID"], "w").write("\\n".join(lines))
if "--time" in sys.argv:
    print(f"{{len(lines)}} sentences in 1.50 ms, the best of 10")
elif "--explain" in sys.argv:
    print("gemm f32 M5 N4 K4 on cpu, bias\\n  mma: cannot: no\\n  simd: chosen")
    print("gemm f32 M5 N8 K4 on cpu, bias\\n  split: chosen\\ngemm f32 M5 N9 K4 on cpu\\n  simd: chosen")
else:
    print(("[" + ", ".join(["1"] + ["0"] * 47) + "]\\n") * len(lines), end="")
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    less = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 80}
    monkeypatch.setattr(models, "MINILM", models.MINILM | less)
    less = {"hidden_size": 72, "num_hidden_layers": 1, "intermediate_size": 80}
    monkeypatch.setattr(models, "SMOLLM", models.SMOLLM | less)
    monkeypatch.setattr(models, "SENTENCES", 5)


def record(out: Path, *given: str) -> tuple[int, list[dict[str, Any]]]:
    status = models.main(["--prompt", "9", "--tokens", "3", "--out", str(out), *given])
    (path,) = out.glob("*/text-models.jsonl")
    first, *lines, last = map(json.loads, path.read_text().splitlines())
    assert first["environment"]["torch"] == torch.__version__ and "transformers" in first["environment"]
    assert first["environment"]["seed"] == 0 and "finished" in last
    assert all(line["suite"] == "text-models" for line in lines)
    return status, lines


def test_comparing_makes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = record(tmp_path)
    assert status == 0 and capsys.readouterr().out.startswith(f"seed 0, torch {torch.__version__}\n")
    expected = [(model, name) for model in ("minilm", "smollm2") for name in models.ATTENTIONS]
    assert [(line["model"], line["impl"]) for line in lines] == expected
    embed, generate = lines[:3], lines[3:]
    assert all(line["ms"] > 0 and line["from_eager"] < 1e-5 for line in embed)
    assert all(line["prompt_ms"] > 0 and line["as_eager"] == line["tokens"] == 3 for line in generate)


def test_a_seed_gives_the_same_models(tmp_path: Path) -> None:
    one, other = (record(tmp_path, "--seed", "0")[1] for _ in range(2))
    assert [x["from_eager"] for x in one[:3]] == [x["from_eager"] for x in other[:3]]


def test_the_program_gives_the_vectors_of_python(tmp_path: Path) -> None:
    built = EXAMPLES.parent / "build" / "release" / "tests" / "minilm" / "minilm"
    program = os.environ.get("TILEWISE_MINILM", str(built))
    if not Path(program).is_file():
        pytest.skip(f"{program} is not there: make build, or TILEWISE_MINILM=PROGRAM")
    status, lines = record(tmp_path, "--minilm", program)
    (line,) = (x for x in lines if x["impl"] == "c++")
    assert status == 0 and line["from_python"] < models.TOLERANCE and line["ms"] > 0
    assert {"gemm", "forward", "ffn forward"} <= set(line["kernels"])


def test_other_vectors_than_pythons_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "fake"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    status, lines = record(tmp_path, "--minilm", str(program))
    assert status == 1 and "C++ and Python on cpu are more than 1e-05 apart" in capsys.readouterr().err
    (line,) = (x for x in lines if x["impl"] == "c++")
    assert line["from_python"] > 0.1 and line["ms"] == 1.5
    assert line["kernels"] == {"gemm": "simd and split"}


def test_the_program_reads_the_sentences_that_python_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    best_seconds = models.best_seconds

    def note(model: Any, call: Any, rounds: int) -> dict[str, float]:
        if len(call.args) == 2:  # those of run_minilm
            seen.extend(call.args)
        return best_seconds(model, call, 1)

    program = tmp_path / "fake"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setattr(models, "best_seconds", note)
    record(tmp_path, "--minilm", str(program))
    ids, mask = seen
    expected = [
        [f"w{n}" for n in row[1 : int(keep.sum()) - 1]] for row, keep in zip(ids.tolist(), mask, strict=True)
    ]
    assert [line.split() for line in (tmp_path / "said").read_text().splitlines()] == expected


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_other_vectors_than_eagers_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    with_each = models.with_each

    def wrong(model: Any, call: Any) -> dict[str, Any]:
        found = with_each(model, call)
        if isinstance(found["tilewise"], torch.Tensor):
            found["tilewise"] = found["tilewise"] + value
        return found

    monkeypatch.setattr(models, "with_each", wrong)
    status, _ = record(tmp_path)
    assert status == 1
    assert capsys.readouterr().err == "Tilewise and eager on cpu are more than 1e-05 apart\n"


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadInput, match=r"transformers.*: pip install transformers safetensors$") as error:
        models.main([])
    assert "\n" not in str(error.value)


def test_a_program_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    for program, message in (("/bin/false", "it ended with status 1"), (tmp_path / "none", "cannot run")):
        with pytest.raises(BadInput, match=rf"^--minilm: {message}") as error:
            models.main(["--minilm", str(program)])
        assert "\n" not in str(error.value)


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--tokens", "1"], ["--prompt", "0"]):
        with pytest.raises(SystemExit):
            models.main(given)
        assert f"{given[0]}: expected a whole number" in capsys.readouterr().err
    with pytest.raises(BadInput, match="--device: expected cpu or cuda"):
        models.main(["--device", "tpu"])


def test_its_words_are_true() -> None:
    found = doctest.testmod(models)
    assert found.attempted and not found.failed
