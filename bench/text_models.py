"""Compares Tilewise with PyTorch's attention in text models of real shapes and random weights.

    python bench/text_models.py --device cuda [--minilm PROGRAM] [--out DIR]

all-MiniLM-L6-v2 embeds sentences; SmolLM2-135M reads a prompt and generates tokens greedily with its cache.
With the program of examples/cpp/minilm, the same random model and sentences go through C++, too. It is an
error if Tilewise's vectors or those of the program differ too much. `examples/minilm/embed.py --compare` and
`examples/smollm/chat.py --compare` do the same with the real weights, where they are installed. With --out,
the results go to DIR/<machine>/text-models.jsonl, with the environment in the first line.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tilewise.bench import environment
from tilewise.bench.options import whole
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Writer

Line = dict[str, Any]
MINILM = {
    **{"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    **{"vocab_size": 30522, "max_position_embeddings": 512, "hidden_act": "gelu"},
}
SMOLLM = {
    **{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 2048},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True},
}
ATTENTIONS = ("eager", "sdpa", "tilewise")
SENTENCES, WORDS = 32, 128  # sentences per batch, words in the longest one
TOLERANCE = 1e-5  # for f32 vectors of length 1: C++ and Python, Tilewise and eager


def spread(model: Any) -> Any:
    """Initialises weights so that P is far from uniform and tokens have different outputs."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.2 * parameter.shape[-1] ** -0.5)
    return model.eval()


def best_seconds(model: Any, call: Callable[[], Any], rounds: int) -> dict[str, float]:
    """The least time with each attention. They take turns. The call must end with a read by the host, so that
    the device has finished."""
    best = dict.fromkeys(ATTENTIONS, float("inf"))
    for round_ in range(rounds + 1):
        for name in ATTENTIONS:
            model.set_attn_implementation(name)
            begin = time.perf_counter()
            call()
            if round_ > 0:  # the first round is a warm-up
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def with_each(model: Any, call: Callable[[], Any]) -> dict[str, Any]:
    """The result of the call with each attention. The last one stays set."""
    found = {}
    for name in ATTENTIONS:
        model.set_attn_implementation(name)
        found[name] = call()
    return found


def run_minilm(device: str, program: str | None) -> Iterator[Line]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**MINILM, attn_implementation="sdpa")
    model = spread(BertModel(config, add_pooling_layer=False)).to(device)
    lengths = torch.randint(8, WORDS + 1, (SENTENCES,))
    ids = torch.randint(1000, 30000, (SENTENCES, WORDS))
    ids[:, 0], mask = 101, (torch.arange(WORDS) < lengths[:, None]).long()
    ids[torch.arange(SENTENCES), lengths - 1] = 102

    @torch.inference_mode()
    def embed(given: Any, keep: torch.Tensor) -> torch.Tensor:
        states = model(given.to(device), attention_mask=keep.to(device)).last_hidden_state
        real = keep.to(device).unsqueeze(-1).to(states.dtype)
        return F.normalize((states * real).sum(1) / real.sum(1)).float().cpu()

    found = with_each(model, partial(embed, ids, mask))
    seconds = best_seconds(model, partial(embed, ids, mask), rounds=10)
    base: Line = {"model": "minilm", "op": "embed", "dtype": "float32", "sentences": SENTENCES}
    for name in ATTENTIONS:
        apart, ms = (found[name] - found["eager"]).abs().max().item(), 1e3 * seconds[name]
        print(f"minilm f32, {SENTENCES} x 8 to {WORDS}: {name:9} {ms:7.2f} ms, {apart:.1e} from eager")
        yield base | {"impl": name, "device": device, "ms": ms, "from_eager": apart}
    if program:
        sentences = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
        for line in run_program(program, model, device, sentences, found["tilewise"]):
            yield base | {"impl": "c++"} | line


def run_program(
    program: str, model: Any, device: str, sentences: list[list[int]], vectors: torch.Tensor
) -> Iterator[Line]:
    """Runs the C++ program on the same weights and tokens and compares its vectors with Python's. The words
    of its vocabulary are the numbers of the tokens.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        state = {name: x.cpu().contiguous() for name, x in model.state_dict().items()}
        save_file(state, Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", **MINILM}))
        special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
        Path(folder, "vocab.txt").write_text("".join(f"{special.get(n, f'w{n}')}\n" for n in range(30522)))
        # The program adds the first and last token itself.
        lines = "".join(" ".join(f"w{n}" for n in sentence[1:-1]) + "\n" for sentence in sentences)
        for place in dict.fromkeys(("cpu", device)):
            command = [program, "--model", folder, "--device", place]
            found = torch.tensor([json.loads(line) for line in output_of(command, lines).splitlines()])
            timed = output_of([*command, "--time"], lines)
            kernels = kernels_in(output_of([*command, "--explain"], lines))
            apart = (found - vectors).abs().max().item()
            print(f"minilm in C++ on {place}: {apart:.1e} from Python's on {device}; {timed.strip()}")
            print("  " + ", ".join(f"{op}: {kernel}" for op, kernel in kernels.items()))
            yield {"device": place, "ms": milliseconds_in(timed), "from_python": apart, "kernels": kernels}


def output_of(command: list[str], lines: str) -> str:
    """The output of a program that gets these lines as its input."""
    try:
        done = subprocess.run(command, input=lines, capture_output=True, text=True)
    except OSError as error:
        raise BadInput(f"--minilm: cannot run {command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise BadInput(f"--minilm: {done.stderr.strip() or f'it ended with status {done.returncode}'}")
    return done.stdout


def milliseconds_in(text: str) -> float:
    """
    >>> milliseconds_in("32 sentences in 12.34 ms, the best of 10\\n")
    12.34
    """
    found = re.search(r" in ([0-9.]+) ms", text)
    if not found:
        raise BadInput(f"--minilm: expected a time, got {text!r}")
    return float(found[1])


def kernels_in(text: str) -> dict[str, str]:
    """The kernels chosen for each operation, from the output of --explain.

    >>> kernels_in("gemm f32 M5 N4 K4 on cpu, bias\\n  mma: cannot: no\\n  simd: chosen\\n")
    {'gemm': 'simd'}
    """
    chosen: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            kernels = chosen.setdefault(line.partition(" f32 ")[0], [])
        elif line.endswith(": chosen"):
            kernels.append(line.strip().partition(":")[0])
    return {operation: " and ".join(dict.fromkeys(kernels)) for operation, kernels in chosen.items()}


def run_smollm(device: str, dtype: torch.dtype, prompt: int, count: int) -> Iterator[Line]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMOLLM, attn_implementation="eager", bos_token_id=None, eos_token_id=None)
    model = spread(LlamaForCausalLM(config)).to(device, dtype)
    ids = torch.randint(0, 49152, (1, prompt), device=device)

    @torch.inference_mode()
    def make(steps: int) -> list[int]:
        cache, tokens, made = DynamicCache(config=config), ids, []
        for _ in range(steps):
            tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            made.append(int(tokens))
        return made

    made = with_each(model, partial(make, count))
    first = best_seconds(model, partial(make, 1), rounds=10)
    all_of_them = best_seconds(model, partial(make, count), rounds=3)
    base: Line = {"model": "smollm2", "op": "generate", "dtype": str(dtype)[6:], "device": device}
    for name in ATTENTIONS:
        same = sum(a == b for a, b in zip(made[name], made["eager"], strict=True))
        ms, rate = 1e3 * first[name], (count - 1) / (all_of_them[name] - first[name])
        print(
            f"smollm2 {str(dtype)[6:]}, {prompt} tokens: {name:9} {ms:7.2f} ms to the first, "
            f"then {rate:6.1f} tokens a second, {same} of {count} tokens as eager"
        )
        line = base | {"impl": name, "prompt": prompt, "tokens": count, "prompt_ms": ms}
        yield line | {"tokens_a_second": rate, "as_eager": same}


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Text models of real shapes and random weights.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--minilm", metavar="PROGRAM", help="examples/cpp/minilm, built")
    parser.add_argument("--prompt", type=whole(1), default=512, help="tokens of the language model's prompt")
    parser.add_argument("--tokens", type=whole(2), default=32, help="how many it makes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of records; none is written without")
    return parser.parse_args(given)


def measure(options: argparse.Namespace, device: str) -> Iterator[Line]:
    types = (torch.float32, torch.bfloat16) if device != "cpu" else (torch.float32,)
    yield from run_minilm(device, options.minilm)
    for dtype in types:
        yield from run_smollm(device, dtype, options.prompt, options.tokens)


def too_far(line: Line) -> list[str]:
    """The failures in a line.

    >>> too_far({"impl": "tilewise", "device": "cpu", "from_eager": 1e-3})
    ['Tilewise and eager on cpu are more than 1e-05 apart']
    >>> too_far({"impl": "sdpa", "device": "cpu", "from_eager": 1e-3})
    []
    """
    ours = {"c++": ("C++ and Python", "from_python"), "tilewise": ("Tilewise and eager", "from_eager")}
    both, key = ours.get(line["impl"], ("", ""))
    near = line.get(key, 0.0) <= TOLERANCE  # false for NaN
    return [] if near else [f"{both} on {line['device']} are more than {TOLERANCE:.0e} apart"]


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.minilm and not shutil.which(options.minilm):
        raise BadInput(f"--minilm: cannot run {options.minilm}: no program of that name")
    place = environment.choose_device(options.device)
    try:
        from tilewise.integrations import transformers as integration

        integration.register()
    except ImportError as error:
        raise BadInput(f"{error}: pip install transformers safetensors") from None
    writer = None
    if options.out:
        described = environment.describe(place)
        described |= {"transformers": importlib.metadata.version("transformers"), "seed": options.seed}
        writer = Writer(
            options.out / environment.slug(described) / "text-models.jsonl", described, (), fresh=True
        )
    print(f"seed {options.seed}, torch {torch.__version__}")
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = False  # so that eager is exact f32, too
    apart: list[str] = []
    for line in measure(options, place.type):
        apart += too_far(line)
        if writer:
            writer.add({"suite": "text-models"} | line)
    if writer:
        writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
        print(f"record: {writer.path}")
    for said in apart:
        print(said, file=sys.stderr)
    return 1 if apart else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as error:
        sys.exit(f"text_models.py: {error}")
