"""examples/gpt: it learns, as the same model on SDPA does; its text, its cache, and bad input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import example

SMALL = ["--device", "cpu", "--length", "32", "--dim", "32", "--depth", "2", "--heads", "2", "--batch", "8"]


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from example(monkeypatch, "gpt", "model", "train")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven eight nine ten. " * 40)
    return path


def test_it_learns_as_with_sdpa_and_writes(gpt: Any, text: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    gpt.train.main(["--text", str(text), "--out", str(out), "--steps", "60", "--prompt", "one ", *SMALL])
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if re.fullmatch(r" *\d+( +\d+\.\d+){2} +\d+", line)]
    assert len(rows) >= gpt.train.ROWS and int(rows[-1][0]) == 60
    first, last = ([float(x) for x in row[1:3]] for row in (rows[0], rows[-1]))
    assert first[0] == pytest.approx(first[1], abs=1e-3)  # the same start and batches: rounding alone
    assert max(last) < 0.7 * min(first)
    assert last[0] == pytest.approx(last[1], abs=0.1)
    assert "Tilewise: loss" in said and "SDPA: loss" in said
    assert len(said.splitlines()[-1]) == 64 and said.splitlines()[-1].startswith("one ")
    picture = (out / "loss.svg").read_text()
    assert ">Tilewise</text>" in picture and ">SDPA</text>" in picture


def test_both_models_are_one(gpt: Any, text: Path) -> None:
    asked = gpt.train.arguments(["--text", str(text), *SMALL])
    corpus = gpt.train.Corpus.of(text.read_text())
    models = gpt.train.make_models(corpus, asked)
    rows = gpt.train.batch_of(corpus.train, 32, 4, torch.Generator().manual_seed(0))
    gradients = []
    for model in models.values():
        gpt.train.loss_of(model, *rows).backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-5, rtol=1e-4)


def test_the_cache_gives_what_the_whole_text_gives(gpt: Any) -> None:
    torch.manual_seed(1)
    model = gpt.model.GPT(20, positions=24, dim=32, depth=2, heads=2)
    tokens = torch.randint(20, (2, 5))
    drawn = model.sample(tokens, 12, temperature=1e-5, seed=3)  # so cold that the likeliest is drawn
    whole = torch.cat([tokens, drawn], 1)
    with torch.no_grad():
        likeliest = model(whole)[:, 4:-1].argmax(-1)
    assert torch.equal(drawn, likeliest)


def test_prose_has_no_code_and_no_tables(gpt: Any) -> None:
    page = "# Title\n\nSome words\nof a line.\n\n```sh\nmake\n```\n\n"
    page += "| a | b |\n| - | - |\n\n<!-- x -->\nThe end.\n"
    assert gpt.train.prose(page) == "# Title\nSome words of a line.\nThe end.\n"
    assert len(gpt.train.read_text(None)) > 100_000


def test_bad_input_is_one_line(gpt: Any, text: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for given, message in (
        (["--text", str(tmp_path / "none.txt")], "--text: cannot read "),
        (["--text", str(tmp_path / "bytes.txt")], "--text: cannot read "),
        (["--text", str(tmp_path / "short.txt")], "--text: expected more than 320 characters, got 9"),
        (["--text", str(text), "--out", str(text / "below")], "--out: cannot make "),
        (["--text", str(text), "--heads", "3"], "embed_dim: expected a multiple of num_heads 3"),
        (["--text", str(text), "--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)) as caught:
            gpt.train.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "out"), *given])
        assert "\n" not in str(caught.value)
