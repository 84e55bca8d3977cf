"""Llama-2 with random weights beside Hugging Face's: prefill and decoding, tokens a second, memory.

python examples/llama/compare.py --model llama-2-7b,llama-2-70b:1 [--prefill 512,2048] [--decode 64]

Times are of the clock, the GPU waited for: what a caller sees, Python included. The two take turns. With
--out, JSON lines go to <out>/<machine>/llama-model.jsonl, the environment first.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.metadata
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import tilewise
import torch
from model import MODELS, Llama
from routes import (
    Call,
    OurDecoding,
    TheirCompiledDecoding,
    TheirDecoding,
    compile_layers,
    hugging_face,
    their_prefill,
    undo_compilation,
)
from tilewise.bench import environment
from tilewise.bench.options import listed as lengths
from tilewise.bench.options import whole
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Writer
from tilewise.bench.timing import peak_bytes, rotated
from torch import Tensor

Line = dict[str, Any]
DTYPES = ("float32", "float16", "bfloat16")
PEERS = ("sdpa", "eager", "tilewise", "compiled")
BOTH = "hf sdpa, compiled"
BESIDE = "tilewise, beside it"


def race(calls: dict[str, Call], device: torch.device, runs: int) -> dict[str, float]:
    """Median milliseconds of each, in turns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(runs + 2):
        for name in rotated(list(calls), number):
            wait()
            start = time.perf_counter()
            calls[name]()
            wait()
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(of) for name, of in times.items()}


def prefill(ours: Llama, theirs: Any, peers: list[str], tokens: Tensor, runs: int) -> Iterator[Line]:
    device = tokens.device
    plain: dict[str, Call] = {"tilewise": functools.partial(ours, tokens)}
    plain |= {f"hf {name}": their_prefill(theirs, name, tokens) for name in peers if name != "compiled"}
    groups = [plain]
    if "compiled" in peers:  # a layer is compiled or not, so that it cannot take turns with itself
        groups.append({BOTH: their_prefill(theirs, "sdpa", tokens), BESIDE: plain["tilewise"]})
    for calls in groups:
        if BOTH in calls:
            compile_layers(theirs)
        peaks = {name: peak_bytes(call, device) * 1e-6 for name, call in calls.items()}
        for name, ms in race(calls, device, runs).items():
            rate = 1e3 * tokens.numel() / ms
            yield {"impl": name, "ms": ms, "tokens_a_second": rate, "peak_mb": peaks[name]}
        if BOTH in calls:
            undo_compilation(theirs)


def decode(
    ours: Llama, theirs: Any, peers: list[str], prompt: Tensor, steps: int, runs: int
) -> Iterator[Line]:
    routes: dict[str, Any] = {"tilewise": OurDecoding(ours, prompt, steps, graph=False)}
    if prompt.is_cuda:
        routes["tilewise, graph"] = OurDecoding(ours, prompt, steps, graph=True)
    routes |= {f"hf {name}": TheirDecoding(theirs, name, prompt) for name in peers if name != "compiled"}
    calls: dict[str, Call] = {name: functools.partial(of.run, steps) for name, of in routes.items()}
    times = race(calls, prompt.device, runs)
    if "compiled" in peers:
        theirs_compiled = TheirCompiledDecoding(theirs, prompt)
        whole, first = (functools.partial(theirs_compiled.run, count) for count in (steps, 0))
        whole()  # is compiled, and leaves the cache that the first finds long enough
        found = race({"whole": whole, "first": first}, prompt.device, runs)
        times[BOTH] = found["whole"] - found["first"]
        torch._dynamo.reset()
    for name, ms in times.items():
        yield {"impl": name, "ms": ms / steps, "tokens_a_second": 1e3 * len(prompt) * steps / ms}


def difference(ours: Llama, theirs: Any, tokens: Tensor) -> Line:
    """Of the logits, over the largest of them; and whether both would say the same token next."""
    left, right = ours(tokens).double(), their_prefill(theirs, "sdpa", tokens)().double()
    same = bool((left.argmax(-1) == right.argmax(-1)).all())
    return {
        "relative_difference": ((left - right).abs().max() / right.abs().max()).item(),
        "same_token": same,
    }


def measure(model: str, asked: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    name, _, layers = model.partition(":")
    peers = listed(asked.against)
    dtype = getattr(torch, asked.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    config = replace(MODELS[name], depth=int(layers) if layers else MODELS[name].depth)
    theirs = hugging_face(config, "sdpa", device, dtype) if peers else None
    ours = Llama(config, device, dtype).requires_grad_(False).eval()
    base: Line = {"suite": "llama-model", "model": name, "layers": config.depth, "device": device.type}
    base |= {"dtype": str(dtype).removeprefix("torch."), "batch": asked.batch}
    base["weights_mb"] = sum(p.nbytes for p in ours.parameters()) * 1e-6
    draw = torch.randint(config.vocabulary, (asked.batch, config.layer.max_positions), device=device)
    prompt = draw[:, : asked.context]
    if theirs is not None:
        ours.load_hugging_face(theirs)
        yield base | {"op": "logits"} | difference(ours, theirs, prompt)
    for length in asked.prefill:
        for line in prefill(ours, theirs, peers, draw[:, :length], asked.runs):
            yield base | {"op": "prefill", "tokens": length} | line
    if asked.decode:
        for line in decode(ours, theirs, peers, prompt, asked.decode, max(2, asked.runs // 4)):
            yield base | {"op": "decode", "context": asked.context, "steps": asked.decode} | line


def transformers_version() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default="llama-2-7b", help=f"some of {', '.join(MODELS)}, by commas;\n:1 for one layer"
    )
    parser.add_argument(
        "--prefill", type=lengths(whole(1)), default="512,1024,2048,4096", help="lengths, by commas"
    )
    parser.add_argument("--decode", type=whole(0), default=64, help="steps; 0 for none")
    parser.add_argument("--context", type=whole(1), default=1024, help="tokens before the first step")
    parser.add_argument("--batch", type=whole(1), default=1)
    parser.add_argument("--against", default="sdpa,eager", help=f"some of {', '.join(PEERS)}, by commas")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, else float32")
    parser.add_argument("--runs", type=whole(1), default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of records; none is written without it")
    asked = parser.parse_args(given)
    for part in listed(asked.model):
        name, colon, layers = part.partition(":")
        if colon and not (layers.isdecimal() and int(layers)):
            parser.error(f"--model: expected a number of layers after {name}:, got {layers!r}")
    for name, known in (("model", tuple(MODELS)), ("against", PEERS)):
        for part in listed(getattr(asked, name)):
            if part.partition(":")[0] not in known:
                parser.error(f"--{name}: expected some of {', '.join(known)}, got {part}")
    for part in listed(asked.model):
        most = MODELS[part.partition(":")[0]].layer.max_positions
        if (longest := max(asked.prefill, default=0)) > most:
            parser.error(f"--prefill: expected at most {most}, the positions of {part}, got {longest}")
        if asked.context + asked.decode > most:
            given = f"{asked.context} and {asked.decode} steps of --decode"
            parser.error(f"--context: expected at most {most}, the positions of {part}, got {given}")
    return asked


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    device = environment.choose_device(asked.device)
    described = environment.describe(device) | {"transformers": transformers_version()}
    writer = None
    if asked.out:
        path = asked.out / environment.slug(described) / "llama-model.jsonl"
        writer = Writer(path, described, environment.IDENTITY, fresh=True)
    for model in listed(asked.model):
        torch.manual_seed(asked.seed)
        with torch.inference_mode():
            for line in measure(model, asked, device):
                if writer:
                    writer.add(line)
                shown = {key: round(x, 4) if isinstance(x, float) else x for key, x in line.items()}
                print({key: x for key, x in shown.items() if key not in ("suite", "device")}, flush=True)
        gc.collect()  # a model that is done with makes room for the next
    if writer:
        writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))


if __name__ == "__main__":
    try:
        main()
    except (BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None
