"""Llama-2 with random weights beside Hugging Face's: prefill and decoding, tokens a second, memory.

python examples/llama/compare.py --model llama-2-7b,llama-2-70b:1 [--prefill 512,2048] [--decode 64]

Prints tables. Times are of the clock, the GPU waited for: what a caller sees, Python included. All take
turns. With --out, JSON lines go to <out>/<machine>/llama-model.jsonl, the environment first, in place of
those that are there; with --append, those of other models stay.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
from model import MODELS, Llama
from routes import (
    Call,
    OurDecoding,
    TheirCompiledDecoding,
    TheirDecoding,
    compile_layers,
    first_line,
    hugging_face,
    their_prefill,
    undo_compilation,
)
from tilewise.bench import environment
from tilewise.bench.options import listed as lengths
from tilewise.bench.options import whole
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Writer
from tilewise.bench.timing import peak_bytes, rotated, summary
from torch import Tensor

Line = dict[str, Any]
DTYPES = ("float32", "float16", "bfloat16")
PEERS = ("sdpa", "eager", "tilewise", "compiled")
BOTH = "hf sdpa, compiled"
BESIDE = "tilewise, beside it"
SAME = (*environment.IDENTITY, "transformers")  # of the environment of lines in one record
OF_A_MODEL = ("model", "layers", "dtype", "batch")


def race(calls: dict[str, Call], device: torch.device, runs: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(runs + 2):
        for name in rotated(list(calls), number):
            calls[name].prepare()
            wait()
            start = time.perf_counter()
            calls[name].run()
            wait()
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def figures(times: list[float], tokens: int, steps: int = 1) -> Line:
    """Milliseconds a step, of runs that each have so many tokens and steps."""
    found = summary(times)
    rate = 1e3 * tokens / found.ms
    return {"ms": found.ms / steps, "spread": found.spread, "runs": found.runs, "tokens_a_second": rate}


def peak_mb(call: Call, device: torch.device) -> float:
    """Of the run alone, made ready before."""
    call.prepare()
    return peak_bytes(call.run, device) * 1e-6


def why_not(compiling: Callable[[], Any]) -> Line | None:
    """The line of a compiled route whose compilation fails, so that the others go on; none where it does not.
    Faults of the device, after which nothing can go on, are raised."""
    try:
        compiling()
    except (BadInput, torch.AcceleratorError):
        raise
    except Exception as error:  # compilers have many reasons
        return {"impl": BOTH, "skipped": first_line(error)}
    return None


def prefill(ours: Llama, theirs: Any, peers: list[str], tokens: Tensor, runs: int) -> Iterator[Line]:
    def raced(calls: dict[str, Call]) -> Iterator[Line]:
        for call in calls.values():
            call()
        peaks = {name: peak_mb(call, tokens.device) for name, call in calls.items()}
        for name, times in race(calls, tokens.device, runs).items():
            yield {"impl": name} | figures(times, tokens.numel()) | {"peak_mb": peaks[name]}

    plain = {"tilewise": Call(functools.partial(ours, tokens))}
    plain |= {f"hf {name}": their_prefill(theirs, name, tokens) for name in peers if name != "compiled"}
    yield from raced(plain)
    if "compiled" in peers:  # a layer is compiled or not, so that it cannot take turns with itself
        compiled = their_prefill(theirs, "sdpa", tokens)
        compile_layers(theirs)
        skipped = why_not(compiled)  # compiles, which takes memory of its own
        if skipped:
            yield skipped
        else:
            yield from raced({BOTH: compiled, BESIDE: plain["tilewise"]})
        undo_compilation(theirs)


def decode(
    ours: Llama, theirs: Any, peers: list[str], prompt: Tensor, steps: int, runs: int
) -> Iterator[Line]:
    routes: dict[str, Any] = {"tilewise": OurDecoding(ours, prompt, steps, graph=False)}
    if prompt.is_cuda:
        routes["tilewise, graph"] = OurDecoding(ours, prompt, steps, graph=True)
    routes |= {f"hf {name}": TheirDecoding(theirs, name, prompt) for name in peers if name != "compiled"}
    skipped = None
    if "compiled" in peers:  # beside the model's own call, which stays as it is: so all take turns

        def compiling() -> None:
            routes[BOTH] = TheirCompiledDecoding(theirs, prompt, steps)

        skipped = why_not(compiling)
    calls = {name: Call(functools.partial(of.run, steps), of.reset) for name, of in routes.items()}
    for call in calls.values():
        call()
    peaks = {
        name: routes[name].held_bytes() * 1e-6 + peak_mb(call, prompt.device) for name, call in calls.items()
    }
    for name, times in race(calls, prompt.device, runs).items():
        line = {"impl": name} | figures(times, len(prompt) * steps, steps) | {"peak_mb": peaks[name]}
        yield line | (routes[name].compilations() if name == BOTH else {})
    if skipped:
        yield skipped
    if "compiled" in peers:
        undo_compilation(theirs)


def difference(ours: Llama, theirs: Any, tokens: Tensor) -> Line:
    """Of the logits from those of hf sdpa, over the largest of these; and whether both would say the same
    token next. Of hf eager likewise: how far two ways of one library are apart.
    """
    right = their_prefill(theirs, "sdpa", tokens)().double()
    found: Line = {}
    for of, call in (
        ("", Call(functools.partial(ours, tokens))),
        ("eager_", their_prefill(theirs, "eager", tokens)),
    ):
        left = call().double()
        found[f"{of}relative_difference"] = ((left - right).abs().max() / right.abs().max()).item()
        found[f"{of}same_token"] = bool((left.argmax(-1) == right.argmax(-1)).all())
    return found


def base_line(model: str, asked: argparse.Namespace, device: torch.device) -> Line:
    """What all lines of a model say."""
    name, _, layers = model.partition(":")
    depth = int(layers) if layers else MODELS[name].depth
    base: Line = {"suite": "llama-model", "model": name, "layers": depth, "device": device.type}
    dtype = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return base | {"dtype": dtype, "batch": asked.batch}


def measure(base: Line, asked: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    peers = listed(asked.against)
    dtype = getattr(torch, base["dtype"])
    config = replace(MODELS[base["model"]], depth=base["layers"])
    theirs = hugging_face(config, "sdpa", device, dtype) if peers else None
    ours = Llama(config, device, dtype).requires_grad_(False).eval()
    base["weights_mb"] = sum(p.nbytes for p in ours.parameters()) * 1e-6
    base["layers_mb"] = sum(p.nbytes for p in ours.layers.parameters()) * 1e-6
    draw = torch.randint(config.vocabulary, (asked.batch, config.layer.max_positions), device=device)
    prompt = draw[:, : asked.context]
    if theirs is not None:
        ours.load_hugging_face(theirs)
        yield base | {"op": "logits"} | difference(ours, theirs, prompt)
    for length in asked.prefill:
        for line in prefill(ours, theirs, peers, draw[:, :length], asked.runs):
            yield base | {"op": "prefill", "tokens": length} | line
    if asked.decode:
        for line in decode(ours, theirs, peers, prompt, asked.decode, asked.decode_runs):
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
        "--model",
        default="llama-2-7b",
        help=f"some of {', '.join(MODELS)}, by commas;\n:1 for one layer, with embedding and head",
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
    parser.add_argument("--runs", type=whole(2), default=10, help="of prefill")
    parser.add_argument("--decode-runs", type=whole(2), default=5, help="of all steps of decoding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of records; none is written without it")
    parser.add_argument("--append", action="store_true", help="keep what the record has of other models")
    asked = parser.parse_args(given)
    if not listed(asked.model):
        parser.error(f"--model: expected some of {', '.join(MODELS)}, got {asked.model!r}")
    if asked.append and not asked.out:
        parser.error("--append: expected --out with it, the folder of the record")
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


def short(value: Any) -> str:
    """A fingerprint by its beginning."""
    return f"{value[:16]}..." if isinstance(value, str) and len(value) == 64 else str(value)


def kept_lines(path: Path, described: Line, bases: list[Line]) -> list[Line]:
    """What the record has of models that are not measured now; it must be of this place and these sources."""
    if not path.exists():
        raise BadInput(
            f"--append: expected a record to keep, got {path}, which is not there: leave --append out"
        )
    try:
        first, *lines = (json.loads(line) for line in path.read_text().splitlines())
        of = dict(first["environment"])
        named = [x for x in lines if "finished" not in x]
        models = [[x[key] for key in OF_A_MODEL] for x in named]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"--append: {path} is no record of this program, or a damaged one") from None
    for key in ("sources", *SAME):  # these first: with them, the binary differs, too
        there, here = of.get(key), described.get(key)
        if there != here:
            differ = f"was made with {key} {short(there)}, and here it is {short(here)}"
            raise BadInput(f"--append: {path} {differ}: give --out a folder without an older record")
    now = [[base[key] for key in OF_A_MODEL] for base in bases]
    return [x for x, model in zip(named, models, strict=True) if model not in now]


def title(line: Line) -> str:
    """The model of the lines that follow."""
    of = f"{line['model']}: layers {line['layers']}, {line['dtype']}, batch {line['batch']}"
    return f"{of}, {line['weights_mb']:,.1f} MB of weights, on {line['device']}"


def columns(op: str) -> str:
    """
    >>> columns("prefill")
    'prefill                                  ms   spread   tokens/s    peak MB'
    """
    what = "decode, one step" if op == "decode" else op
    return f"{what:32} {'ms':>10} {'spread':>8} {'tokens/s':>10} {'peak MB':>10}"


def row(line: Line) -> str:
    """A line of the record as one of the table.

    >>> row({"op": "prefill", "tokens": 512, "impl": "tilewise", "skipped": "no compiler"})
    '    512  tilewise                no compiler'
    """
    if line["op"] == "logits":
        found = []
        for name, of in (("tilewise", ""), ("hf eager", "eager_")):
            token = "same" if line[f"{of}same_token"] else "OTHER"
            found.append(f"{name} {line[f'{of}relative_difference']:.1e} ({token} token)")
        return f"logits, largest difference from hf sdpa over its largest: {', '.join(found)}"
    place = f"{line['tokens'] if line['op'] == 'prefill' else line['context']:7}  {line['impl']:23}"
    if "skipped" in line:
        return f"{place} {line['skipped']}"
    rates = f"{line['tokens_a_second']:10,.0f} {line['peak_mb']:10,.1f}"
    return f"{place} {line['ms']:10.3f} {line['spread']:8.1%} {rates}"


def show(line: Line, before: Line | None) -> None:
    """Prints the line, after a title or the names of columns where the one before was of something else."""
    if before is None:
        print(title(line))
    if line["op"] != "logits" and (before is None or before["op"] != line["op"]):
        print(columns(line["op"]))
    print(row(line), flush=True)


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    device = environment.choose_device(asked.device)
    described = environment.describe(device) | {"transformers": transformers_version()}
    bases = [base_line(model, asked, device) for model in listed(asked.model)]
    writer, kept = None, []
    if asked.out:
        path = asked.out / environment.slug(described) / "llama-model.jsonl"
        kept = kept_lines(path, described, bases) if asked.append else []
        writer = Writer(path, described, SAME, fresh=True)
    for base in bases:
        torch.manual_seed(asked.seed)
        before = None
        with torch.inference_mode():
            for line in measure(base, asked, device):
                for one in (*kept, line) if writer else ():
                    writer.add(one)
                kept = []
                show(line, before)
                before = line
        gc.collect()  # a model that is done with makes room for the next
    if writer:
        writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))


if __name__ == "__main__":
    try:
        main()
    except (tilewise.Error, BadInput) as reason:
        raise SystemExit(str(reason)) from None
