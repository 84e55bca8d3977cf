"""Llama-2 with random weights beside Hugging Face's: prefill and decoding, tokens a second, memory.

python examples/llama/compare.py --model llama-2-7b [--layers 1] [--prefill 512,2048] [--decode 64]

Times are of the clock, the GPU waited for: what a caller sees, Python included. The two take turns. With
--out, JSON lines go to <out>/<machine>/llama-model.jsonl, the environment first.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import tilewise
import torch
from model import MODELS, Llama, LlamaConfig
from tilewise.bench import environment
from tilewise.bench.records import Writer
from tilewise.bench.timing import peak_bytes, rotated
from torch import Tensor

Call = Callable[[], Tensor]
Line = dict[str, Any]
PEERS = ("sdpa", "eager", "tilewise", "compiled")


def hugging_face(config: LlamaConfig, attention: str, device: torch.device, dtype: torch.dtype) -> Any:
    """LlamaForCausalLM of that shape."""
    try:
        import transformers
        from tilewise.integrations import transformers as integration
    except ImportError:
        raise SystemExit("Hugging Face is not here: pip install transformers, or --against ''") from None
    integration.register()
    layer = config.layer
    shape = transformers.LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=layer.embed_dim,
        intermediate_size=layer.ffn_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        max_position_embeddings=layer.max_positions,
        rms_norm_eps=layer.eps,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        made = transformers.LlamaForCausalLM._from_config(shape, attn_implementation=attention, dtype=dtype)
    return made.eval().requires_grad_(False)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def race(calls: dict[str, Call], device: torch.device, runs: int) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(runs + 2):
        for name in rotated(list(calls), number):
            wait(device)
            start = time.perf_counter()
            calls[name]()
            wait(device)
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(of) for name, of in times.items()}


def their_prefill(theirs: Any, attention: str, tokens: Tensor) -> Call:
    def call() -> Tensor:
        theirs.set_attn_implementation(attention)
        return theirs(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]

    return call


def compiled_layers(theirs: Any) -> None:
    """Layer by layer, as all are alike: it is compiled once."""
    for layer in theirs.model.layers:
        layer.compile(dynamic=False)


def decompiled_layers(theirs: Any) -> None:
    for layer in theirs.model.layers:
        layer._compiled_call_impl = None
    torch._dynamo.reset()


def prefill(
    ours: Llama, theirs: Any, peers: list[str], tokens: Tensor, runs: int
) -> dict[str, dict[str, float]]:
    device = tokens.device
    calls: dict[str, Call] = {"tilewise": lambda: ours(tokens)}
    calls |= {f"hf {name}": their_prefill(theirs, name, tokens) for name in peers if name != "compiled"}
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
    times = race(calls, device, runs)
    if "compiled" in peers:  # a layer is compiled or not: these two cannot take turns with the others
        compiled_layers(theirs)
        again: dict[str, Call] = {"hf sdpa, compiled": their_prefill(theirs, "sdpa", tokens)}
        again |= {"tilewise beside it": calls["tilewise"]}
        peaks["hf sdpa, compiled"] = peak_bytes(again["hf sdpa, compiled"], device)
        found = race(again, device, runs)
        times["hf sdpa, compiled"] = found["hf sdpa, compiled"]
        times["tilewise beside it"] = found["tilewise beside it"]
        decompiled_layers(theirs)
    return {name: {"ms": ms, "peak_mb": peaks.get(name, 0) * 1e-6} for name, ms in times.items()}


class OurDecoding:
    """A token at a time, from a CUDA graph where there is one."""

    def __init__(self, model: Llama, prompt: Tensor, steps: int, graph: bool) -> None:
        self.model = model
        self.caches = model.make_caches(len(prompt), prompt.shape[1] + steps + 8)
        self.token = model(prompt, self.caches).argmax(-1, keepdim=True)
        self.start = prompt.shape[1]
        self.replay: Callable[[], Any] = self._step
        if graph:
            self._step()
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._step()
            self.replay = captured.replay

    def _step(self) -> None:
        self.token.copy_(self.model(self.token, self.caches).argmax(-1, keepdim=True))

    def run(self, steps: int) -> Tensor:
        for cache in self.caches:
            cache.lengths.fill_(self.start)
        for _ in range(steps):
            self.replay()
        return self.token


class TheirDecoding:
    def __init__(self, model: Any, attention: str, prompt: Tensor) -> None:
        self.model, self.attention = model, attention
        model.set_attn_implementation(attention)
        found = model(prompt, use_cache=True, logits_to_keep=1)
        self.cache, self.start = found.past_key_values, prompt.shape[1]
        self.token = found.logits[:, -1].argmax(-1, keepdim=True)

    def run(self, steps: int) -> Tensor:
        self.model.set_attn_implementation(self.attention)
        if added := self.cache.get_seq_length() - self.start:
            self.cache.crop(-added)
        token = self.token
        for _ in range(steps):
            found = self.model(token, past_key_values=self.cache, use_cache=True)
            token = found.logits[:, -1].argmax(-1, keepdim=True)
        return token


def decode(
    ours: Llama, theirs: Any, peers: list[str], prompt: Tensor, steps: int, runs: int
) -> dict[str, float]:
    """Milliseconds a token."""
    device = prompt.device
    routes: dict[str, Any] = {"tilewise": OurDecoding(ours, prompt, steps, graph=False)}
    if device.type == "cuda":
        routes["tilewise, graph"] = OurDecoding(ours, prompt, steps, graph=True)
    routes |= {f"hf {name}": TheirDecoding(theirs, name, prompt) for name in peers if name != "compiled"}
    calls: dict[str, Call] = {name: (lambda of=route: of.run(steps)) for name, route in routes.items()}
    return {name: ms / steps for name, ms in race(calls, device, runs).items()}


def difference(ours: Llama, theirs: Any, tokens: Tensor) -> Line:
    """Of the logits, over the largest of them; and whether both would say the same token next."""
    theirs.set_attn_implementation("sdpa")
    left, right = (
        ours(tokens).double(),
        theirs(tokens, use_cache=False, logits_to_keep=1).logits[:, -1].double(),
    )
    apart = ((left - right).abs().max() / right.abs().max()).item()
    return {
        "op": "logits",
        "relative_difference": apart,
        "same_token": bool((left.argmax(-1) == right.argmax(-1)).all()),
    }


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b", help=f"some of {', '.join(MODELS)}, by commas")
    parser.add_argument("--layers", type=int, help="so many instead of all")
    parser.add_argument("--prefill", default="512,1024,2048,4096", help="lengths, by commas")
    parser.add_argument("--decode", type=int, default=64, help="steps; 0 for none")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the first step")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--against", default="sdpa,eager", help=f"some of {', '.join(PEERS)}, by commas")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, else float32")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of records; none is written without it")
    asked = parser.parse_args(given)
    for name in listed(asked.model):
        if name not in MODELS:
            parser.error(f"--model: expected some of {', '.join(MODELS)}, got {name}")
    for name in (peers := listed(asked.against)):
        if name not in PEERS:
            parser.error(f"--against: expected some of {', '.join(PEERS)}, got {name}")

    device = environment.choose_device(asked.device)
    dtype = getattr(torch, asked.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    described = environment.describe(device)
    writer = None
    if asked.out:
        path = asked.out / environment.slug(described) / "llama-model.jsonl"
        writer = Writer(path, described, (), fresh=not path.exists())

    def say(line: Line) -> None:
        if writer:
            writer.add(line)
        print({key: round(x, 4) if isinstance(x, float) else x for key, x in line.items()}, flush=True)

    for name in listed(asked.model):
        torch.manual_seed(asked.seed)
        config = replace(MODELS[name], depth=asked.layers or MODELS[name].depth)
        theirs = hugging_face(config, "sdpa", device, dtype) if peers else None
        ours = Llama(config, device, dtype).requires_grad_(False).eval()
        base: Line = {
            "suite": "llama-model",
            "model": name,
            "layers": config.depth,
            "device": device.type,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": asked.batch,
        }
        weights_mb = sum(p.nbytes for p in ours.parameters()) * 1e-6
        with torch.inference_mode():
            draw = torch.randint(config.vocabulary, (asked.batch, 4096), device=device)
            if theirs is not None:
                ours.load_hugging_face(theirs)
                say(base | difference(ours, theirs, draw[:, : asked.context]))
            for length in map(int, listed(asked.prefill)):
                found = prefill(ours, theirs, peers, draw[:, :length], asked.runs)
                for impl, figures in found.items():
                    rate = {"tokens_a_second": 1e3 * asked.batch * length / figures["ms"]}
                    op = {"op": "prefill", "impl": impl, "tokens": length, "weights_mb": weights_mb}
                    say(base | op | figures | rate)
            if asked.decode:
                found = decode(
                    ours, theirs, peers, draw[:, : asked.context], asked.decode, max(2, asked.runs // 4)
                )
                for impl, ms in found.items():
                    rate = {"ms": ms, "tokens_a_second": 1e3 * asked.batch / ms}
                    say(
                        base
                        | {"op": "decode", "impl": impl, "context": asked.context, "steps": asked.decode}
                        | rate
                    )
        del ours, theirs
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if writer:
        writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))


if __name__ == "__main__":
    try:
        main()
    except tilewise.Error as reason:
        raise SystemExit(str(reason)) from None
