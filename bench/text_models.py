"""Text models of real shapes and random weights: Tilewise beside PyTorch's attention, equality and speed.

    python bench/text_models.py --device cuda [--minilm PROGRAM]

all-MiniLM-L6-v2 embeds sentences; SmolLM2-135M reads a prompt and makes tokens greedily over its cache. With
the program of examples/cpp/minilm, the same random model goes through C++, too. Where the real weights are
installed, `examples/minilm/embed.py --compare` and `examples/smollm/chat.py --compare` say the like of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

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


def spread(model: Any) -> Any:
    """Weights that make attention far from uniform, and outputs that tell tokens apart."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.2 * parameter.shape[-1] ** -0.5)
    return model.eval()


def best_seconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least of each, taking turns; calls end with a read by the host, so that the device has finished."""
    best = dict.fromkeys(calls, float("inf"))
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if round_ > 0:  # the first is not counted
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def run_minilm(device: str, program: str | None) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(**MINILM, attn_implementation="sdpa")
    model = spread(BertModel(config, add_pooling_layer=False)).to(device)
    lengths = torch.randint(8, 129, (32,))
    ids = torch.randint(1000, 30000, (32, 128))
    ids[:, 0], mask = 101, (torch.arange(128) < lengths[:, None]).long()
    ids[torch.arange(32), lengths - 1] = 102

    @torch.inference_mode()
    def embed(given: Any, keep: torch.Tensor, name: str = "tilewise") -> torch.Tensor:
        model.set_attn_implementation(name)
        states = model(given.to(device), attention_mask=keep.to(device)).last_hidden_state
        real = keep.to(device).unsqueeze(-1).to(states.dtype)
        return F.normalize((states * real).sum(1) / real.sum(1)).float().cpu()

    found = {name: embed(ids, mask, name) for name in ATTENTIONS}
    seconds = best_seconds({name: partial(embed, ids, mask, name) for name in ATTENTIONS}, rounds=10)
    for name in ATTENTIONS:
        apart = (found[name] - found["eager"]).abs().max()
        print(f"minilm f32, 32 x 8 to 128: {name:9} {1e3 * seconds[name]:7.2f} ms, {apart:.1e} from eager")
    if program:
        run_program(program, model, device, embed)


def run_program(program: str, model: Any, device: str, embed: Callable[..., torch.Tensor]) -> None:
    """The C++ program on the same weights, with words that are numbers in its vocabulary."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        state = {name: x.cpu().contiguous() for name, x in model.state_dict().items()}
        save_file(state, Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", **MINILM}))
        special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
        Path(folder, "vocab.txt").write_text("".join(f"{special.get(n, f'w{n}')}\n" for n in range(30522)))
        words = [torch.randint(1000, 30000, (int(n),)).tolist() for n in torch.randint(6, 127, (32,))]
        lines = "".join(" ".join(f"w{n}" for n in sentence) + "\n" for sentence in words)
        truth = torch.cat(
            [
                embed(torch.tensor([[101, *sentence, 102]]), torch.ones(1, len(sentence) + 2).long())
                for sentence in words
            ]
        )
        for place in {"cpu", device}:
            command = [program, "--model", folder, "--device", place]
            done = subprocess.run(command, input=lines, capture_output=True, text=True)
            if done.returncode != 0:
                print(f"minilm in C++ on {place}: {done.stderr.strip()}")
                continue
            vectors = torch.tensor([json.loads(line) for line in done.stdout.splitlines()])
            timed = subprocess.run([*command, "--time"], input=lines, capture_output=True, text=True).stdout
            apart = (vectors - truth).abs().max()
            print(f"minilm in C++ on {place}: {apart:.1e} from Python's; {timed.strip()}")
        command = [program, "--model", folder, "--device", device, "--explain"]
        told = subprocess.run(command, input=lines, capture_output=True, text=True).stdout
        print("\n".join(line for line in told.splitlines() if not line.startswith("  ") or "chosen" in line))


def run_smollm(device: str, dtype: torch.dtype, prompt: int, count: int) -> None:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMOLLM, attn_implementation="eager", bos_token_id=None, eos_token_id=None)
    model = spread(LlamaForCausalLM(config)).to(device, dtype)
    ids = torch.randint(0, 49152, (1, prompt), device=device)

    @torch.inference_mode()
    def make(steps: int, name: str) -> list[int]:
        model.set_attn_implementation(name)
        cache, tokens, made = DynamicCache(config=config), ids, []
        for _ in range(steps):
            tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            made.append(int(tokens))
        return made

    made = {name: make(count, name) for name in ATTENTIONS}
    first = best_seconds({name: partial(make, 1, name) for name in ATTENTIONS}, rounds=10)
    whole = best_seconds({name: partial(make, count, name) for name in ATTENTIONS}, rounds=3)
    for name in ATTENTIONS:
        same = sum(a == b for a, b in zip(made[name], made["eager"], strict=True))
        print(
            f"smollm2 {str(dtype)[6:]}, {prompt} tokens: {name:9} {1e3 * first[name]:7.2f} ms to the first, "
            f"then {(count - 1) / (whole[name] - first[name]):6.1f} tokens a second, "
            f"{same} of {count} tokens as eager"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Text models of real shapes and random weights.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--minilm", metavar="PROGRAM", help="examples/cpp/minilm, built")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the language model's prompt")
    parser.add_argument("--tokens", type=int, default=32, help="how many it makes")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)))
    options = parser.parse_args()
    try:
        from tilewise.integrations import transformers as integration

        integration.register()
    except ImportError as error:
        sys.exit(f"text_models.py: {error}")
    print(f"seed {options.seed}, torch {torch.__version__}")
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = False  # so that eager, too, is f32
    run_minilm(options.device, options.minilm)
    types = (torch.float32, torch.bfloat16) if options.device != "cpu" else (torch.float32,)
    for dtype in types:
        run_smollm(options.device, dtype, options.prompt, options.tokens)


if __name__ == "__main__":
    main()
