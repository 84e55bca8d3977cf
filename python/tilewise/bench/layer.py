"""Times products, networks, norms, rotary embedding and whole layers against PyTorch, eager and compiled.

python -m tilewise.bench.layer [--suite gemm,ffn,norm,layer,decode] [--compile] [--out FILE]

In one process, in turn, by `timing.race`. A line for each implementation of each problem, JSON with --out.
Errors are the largest against PyTorch in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import nn
from tilewise.bench import environment
from tilewise.bench.timing import Entrant, full_precision, peak_bytes, race

Function = Callable[..., Any]
SUITES = ("gemm", "ffn", "norm", "layer", "decode")


@dataclass
class Problem:
    """Ours and theirs, on sets of tensors that are made when they are needed."""

    suite: str
    sizes: dict[str, Any]
    ours: Function
    theirs: Function
    inputs: Callable[[torch.dtype], tuple[Any, ...]]
    flops: float = 0.0
    bytes: Callable[[int], float] = field(default=lambda width: 0.0)
    graph: bool = False
    """Whether ours is timed from a CUDA graph, too."""


def normal(device: torch.device, *shape: int, scale: float = 1.0) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: (torch.randn(shape, device=device) * scale).to(dtype)


def made(*makers: Callable[[torch.dtype], Any]) -> Callable[[torch.dtype], tuple[Any, ...]]:
    return lambda dtype: tuple(make(dtype) for make in makers)


def scaled(elements: float) -> Callable[[int], float]:
    """Bytes of that many elements, by the width of one."""
    return lambda width: elements * width


def gemm_problems(device: torch.device) -> Iterator[Problem]:
    gpu = device.type == "cuda"
    squares = [2048, 4096, 8192] if gpu else [512, 1024]
    shapes = [(n, n, n) for n in squares]
    shapes += (
        [(m, 11008, 4096) for m in (1, 16, 64, 512, 2048)] if gpu else [(1, 4096, 4096), (197, 3072, 768)]
    )
    for m, n, k in shapes:
        yield Problem(
            *("gemm", {"m": m, "n": n, "k": k}, tilewise.linear, F.linear),
            made(normal(device, m, k), normal(device, n, k, scale=k**-0.5)),
            flops=2.0 * m * n * k,
            bytes=scaled(m * k + n * k + m * n),
        )


def ffn_problems(device: torch.device) -> Iterator[Problem]:
    gpu = device.type == "cuda"
    embed, hidden = (4096, 11008) if gpu else (768, 3072)
    for tokens in (1, 16, 64, 512, 1024, 2048, 4096) if gpu else (1, 64, 197):
        weights = (
            normal(device, hidden, embed, scale=embed**-0.5),
            normal(device, embed, hidden, scale=hidden**-0.5),
        )
        x, gate = normal(device, tokens, embed), weights[0]
        for kind in ("gelu", "swiglu"):
            gated = kind == "swiglu"
            yield Problem(
                "ffn",
                {"kind": kind, "tokens": tokens, "embed": embed, "hidden": hidden},
                (lambda x, u, d, g: tilewise.ffn(x, u, d, gate=g, activation="silu"))
                if gated
                else tilewise.ffn,
                (lambda x, u, d, g: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d))
                if gated
                else (lambda x, u, d: F.linear(F.gelu(F.linear(x, u)), d)),
                made(x, *weights, *([gate] if gated else [])),
                flops=(6.0 if gated else 4.0) * tokens * embed * hidden,
                bytes=scaled((3 if gated else 2) * embed * hidden),
            )


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotary embedding."""
    both = (torch.cat([t, t], -1).to(x.dtype) for t in (cos, sin))
    half = x.shape[-1] // 2
    cos, sin = both
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def norm_problems(device: torch.device) -> Iterator[Problem]:
    gpu = device.type == "cuda"
    rows, dim = (16384, 4096) if gpu else (2048, 1024)
    sizes = {"rows": rows, "dim": dim}
    x, w = normal(device, rows, dim), normal(device, dim)
    yield Problem(
        *("norm", {"kind": "rms"} | sizes, tilewise.rms_norm, lambda x, w: F.rms_norm(x, (dim,), w, 1e-6)),
        made(x, w),
        bytes=scaled(2.0 * rows * dim),
    )
    yield Problem(
        *(
            "norm",
            {"kind": "layer"} | sizes,
            tilewise.layer_norm,
            lambda x, w, b: F.layer_norm(x, (dim,), w, b),
        ),
        made(x, w, w),
        bytes=scaled(2.0 * rows * dim),
    )
    yield Problem(
        "norm",
        {"kind": "rms with residual"} | sizes,
        lambda x, w, r: tilewise.rms_norm(x, w, residual=r),
        lambda x, w, r: (F.rms_norm(x + r, (dim,), w, 1e-6), x + r),
        made(x, w, x),
        bytes=scaled(4.0 * rows * dim),
    )
    heads, length = (32, 8192) if gpu else (16, 512)
    cos, sin = tilewise.rope_tables(length, 128, device=device)
    yield Problem(
        "norm",
        {"kind": "rope", "heads": heads, "length": length, "dim": 128},
        lambda q, k: tilewise.apply_rope(q, k, cos, sin),
        lambda q, k: (turned(q, cos, sin), turned(k, cos, sin)),
        made(normal(device, 1, heads, length, 128), normal(device, 1, heads, length, 128)),
        bytes=scaled(4.0 * heads * length * 128),
    )


def plain_layer(layer: nn.TransformerLayer) -> Function:
    """The layer as PyTorch's functions, with the same weights."""
    config, parts = layer.config, layer.attention

    def norm(module: Any, x: Tensor) -> Tensor:
        if config.norm == "rms":
            return F.rms_norm(x, (config.embed_dim,), module.weight, config.eps)
        return F.layer_norm(x, (config.embed_dim,), module.weight, module.bias, config.eps)

    def heads(x: Tensor, projection: Any) -> Tensor:
        rows = F.linear(x, projection.weight, projection.bias)
        return rows.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    def network(x: Tensor) -> Tensor:
        network: Any = layer.ffn
        up = F.linear(x, network.up_proj.weight, network.up_proj.bias)
        up = F.silu(F.linear(x, network.gate_proj.weight)) * up if config.gated else F.gelu(up)
        return F.linear(up, network.down_proj.weight, network.down_proj.bias)

    def forward(x: Tensor, cache: nn.KVCache | None = None) -> Tensor:
        rows = norm(layer.attention_norm, x)
        q, k, v = (heads(rows, p) for p in (parts.q_proj, parts.k_proj, parts.v_proj))
        first = 0 if cache is None else cache.k.shape[2] - x.shape[1]  # a full cache: its last places
        if layer.rotary is not None:
            angles = [t[first : first + x.shape[1]] for t in (layer.rotary.cos, layer.rotary.sin)]
            q, k = turned(q, *angles), turned(k, *angles)
        if cache is not None:
            cache.k[:, :, first:], cache.v[:, :, first:] = k, v
            k, v = cache.k, cache.v
        grouped = config.num_kv_heads != config.num_heads
        causal = config.is_causal and cache is None
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        out = F.linear(out.transpose(1, 2).flatten(2), parts.out_proj.weight, parts.out_proj.bias)
        x = x + out
        return x + network(norm(layer.ffn_norm, x))

    return forward


def layer_flops(config: nn.LayerConfig, tokens: int) -> float:
    width = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    products = config.embed_dim * (width + (3 if config.gated else 2) * config.ffn_dim)
    pairs = tokens * tokens / (2 if config.is_causal else 1)
    return 2.0 * tokens * products + 4.0 * config.num_heads * config.head_dim * pairs


def random_layer(
    name: str, device: torch.device, **changes: Any
) -> Callable[[torch.dtype], nn.TransformerLayer]:
    def make(dtype: torch.dtype) -> nn.TransformerLayer:
        return nn.TransformerLayer(name, device=device, dtype=dtype, **changes).requires_grad_(False)

    return make


_SMALL = {"embed_dim": 1024, "num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "ffn_dim": 2752}


def layer_problems(device: torch.device) -> Iterator[Problem]:
    gpu = device.type == "cuda"
    cases: list[tuple[str, int, dict[str, Any]]] = [("vit-b/16", 197, {})]
    if gpu:
        cases += [("llama-2-7b", tokens, {}) for tokens in (512, 1024, 2048, 4096)]
        cases += [("llama-2-13b", 2048, {}), ("llama-2-70b", 2048, {}), ("llama-3-8b", 2048, {})]
    else:
        cases += [("llama-2-7b", 256, _SMALL)]
    for name, tokens, changes in cases:
        make = random_layer(name, device, **changes)
        config = make_config(name, changes)
        yield Problem(
            "layer",
            {"name": name, "batch": 1, "tokens": tokens, "embed": config.embed_dim},
            lambda x, layer: layer(x),
            lambda x, layer: plain_layer(layer)(x),
            made(normal(device, 1, tokens, config.embed_dim), make),
            flops=layer_flops(config, tokens),
        )


def make_config(name: str, changes: dict[str, Any]) -> nn.LayerConfig:
    with torch.device("meta"):
        return nn.TransformerLayer(name, **changes).config


def decode_problems(device: torch.device) -> Iterator[Problem]:
    gpu = device.type == "cuda"
    context, changes = (4096, {}) if gpu else (512, _SMALL)
    config = make_config("llama-2-7b", changes)
    weights = config.embed_dim * (
        config.head_dim * 2 * (config.num_heads + config.num_kv_heads) + 3 * config.ffn_dim
    )
    for batch in (1, 16):

        def cache(dtype: torch.dtype, batch: int = batch) -> nn.KVCache:
            shape = (batch, config.num_kv_heads, context, config.head_dim)
            k, v = (normal(device, *shape)(dtype) for _ in range(2))
            return nn.KVCache(k, v, torch.full((batch,), context - 1, dtype=torch.int32, device=device))

        def ours(x: Tensor, layer: nn.TransformerLayer, cache: nn.KVCache) -> Tensor:
            out = layer(x, cache=cache)
            cache.lengths -= x.shape[1]  # the same step again
            return out

        yield Problem(
            "decode",
            {"name": "llama-2-7b", "batch": batch, "context": context, "embed": config.embed_dim},
            ours,
            lambda x, layer, cache: plain_layer(layer)(x, cache),
            made(
                normal(device, batch, 1, config.embed_dim),
                random_layer("llama-2-7b", device, **changes),
                cache,
            ),
            bytes=scaled(weights + 2 * batch * config.num_kv_heads * context * config.head_dim),
            graph=gpu,
        )


PROBLEMS = {
    "gemm": gemm_problems,
    "ffn": ffn_problems,
    "norm": norm_problems,
    "layer": layer_problems,
    "decode": decode_problems,
}


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.nn.Module):
        import copy

        return copy.deepcopy(value).double()
    if isinstance(value, nn.KVCache):
        return nn.KVCache(value.k.double(), value.v.double(), value.lengths.clone())
    return value


def measure(
    problem: Problem, dtype: torch.dtype, device: torch.device, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    inputs = problem.inputs(dtype)
    calls: dict[str, Callable[[], Any]] = {
        "tilewise": lambda: problem.ours(*inputs),
        "torch": lambda: problem.theirs(*inputs),
    }
    errors: dict[str, float] = {}
    if arguments.errors:
        exact = first(problem.theirs(*(widened(x) for x in inputs)))
        errors = {name: (first(call()).double() - exact).abs().max().item() for name, call in calls.items()}
        del exact
    if problem.graph:
        calls["tilewise, graph"] = graphed(calls["tilewise"])
    if arguments.compile:
        torch._dynamo.reset()
        mode = "max-autotune" if device.type == "cuda" else "default"
        compiled = torch.compile(problem.theirs, mode=mode)
        calls["torch, compiled"] = lambda: compiled(*inputs)
    entrants = {name: Entrant([call]) for name, call in calls.items()}
    peaks = {name: peak_bytes(call, device) for name, call in calls.items() if "graph" not in name}
    lines = []
    for name, timing in race(entrants, device, arguments.runs, arguments.seconds).items():
        seconds = timing.ms / 1e3
        lines.append(
            {
                **{"suite": problem.suite, "impl": name, "dtype": str(dtype).removeprefix("torch.")},
                **problem.sizes,
                **{"ms": round(timing.ms, 5), "spread": round(timing.spread, 3), "runs": timing.runs},
                "tflops": round(problem.flops / seconds / 1e12, 3) if problem.flops else None,
                "gbps": round(problem.bytes(dtype.itemsize) / seconds / 1e9, 1) or None,
                "peak_mb": round(peaks[name] / 2**20, 1) if name in peaks else None,
                "error": errors.get(name),
            }
        )
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    ours = next(line["ms"] for line in lines if line["impl"] == "tilewise")
    skipped = ("suite", "impl", "dtype", "ms", "spread", "runs", "tflops", "gbps", "peak_mb", "error")
    sizes = " ".join(f"{key}={value}" for key, value in lines[0].items() if key not in skipped)
    print(f"{lines[0]['suite']} {lines[0]['dtype']} {sizes}")
    for line in lines:
        rate = f"{line['tflops']:8.2f} TFLOP/s" if line["tflops"] else f"{line['gbps'] or 0:8.0f} GB/s   "
        error = f"  error {line['error']:.1e}" if line["error"] is not None else ""
        ratio = line["ms"] / ours
        print(f"  {line['impl']:16s} {line['ms']:10.4f} ms {rate}  {ratio:5.2f} x ours{error}", flush=True)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise.bench.layer", description=__doc__)
    parser.add_argument("--suite", default=",".join(SUITES), help="which, by commas")
    parser.add_argument("--dtype", default="bfloat16,float32", help="types, by commas")
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true", help="torch.compile as a peer, too: minutes")
    parser.add_argument("--errors", action="store_true", help="measure errors against float64")
    parser.add_argument("--runs", type=int, default=30, help="of each on a GPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each on a CPU")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines are written there")
    arguments = parser.parse_args(given)
    unknown = set(arguments.suite.split(",")) - set(SUITES)
    if unknown:
        parser.error(f"--suite: expected some of {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")

    device = environment.choose_device(arguments.device)
    described = environment.describe(device)
    print(json.dumps(described) if arguments.out is None else described.get("device", device))
    found: list[dict[str, Any]] = []
    with torch.no_grad(), full_precision():
        for suite in arguments.suite.split(","):
            for name in arguments.dtype.split(","):
                for problem in PROBLEMS[suite](device):
                    lines = measure(problem, getattr(torch, name), device, arguments)
                    show(lines)
                    found += lines
    if arguments.out is not None:
        records = [{"environment": described}, *found]
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
