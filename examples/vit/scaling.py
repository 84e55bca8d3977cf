"""ViT-B/16 over the size of its images: attention's time a call and the whole model's, for every kernel.

python examples/vit/scaling.py [--pixels 224,384,512] [--batch 32] [--dtype bf16,f32] [--out DIR]

PyTorch's model has the same weights and is PyTorch throughout; "torch + auto" is that model with attention
alone by Tilewise; rows by the name of a kernel are the example's model, "layer" is one on TransformerLayer.
Times are of CUDA events, in turn, by `tilewise.bench.timing`; attention's inputs are rotated past the L2.
JSON lines go to <out>/<machine>/vit-model.jsonl, from which `make figures` draws.
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
import torch.nn.functional as F
from model import ViT, ViTConfig
from tilewise.bench import environment, suites, timing
from tilewise.bench.implementations import kernels_on, refusal
from tilewise.bench.operands import DTYPES
from tilewise.bench.options import listed, number, whole
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Writer
from tilewise.nn import LayerConfig, TransformerLayer
from torch import Tensor, nn

Calls = dict[str, list[Callable[[], Any]]]  # of each, the same on every set of inputs
Line = dict[str, Any]


class TorchFeedForward(tilewise.nn.FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class TorchLayerNorm(tilewise.nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)


PYTORCHS: dict[type[nn.Module], Any] = {
    tilewise.nn.FeedForward: TorchFeedForward,
    tilewise.nn.LayerNorm: TorchLayerNorm,
}


def pytorchs(model: nn.Module) -> nn.Module:
    """The model with PyTorch's operations around attention, on the weights it has."""
    for part in model.modules():
        if type(part) in PYTORCHS:
            part.__class__ = PYTORCHS[type(part)]
    return model


def base_16(pixels: int, depth: int, device: torch.device) -> ViT:
    """ViT-B/16 with random weights."""
    config = ViTConfig(pixels, 16, 3, classes=1000, dim=768, depth=depth, heads=12)
    with torch.device(device):
        return ViT(config).eval().requires_grad_(False)


def with_attention(model: ViT, attention: str) -> ViT:
    """The same model, on the same weights; "layer" has blocks of `tilewise.nn.TransformerLayer`."""
    config = model.config
    with torch.device("meta"):
        other = ViT(config, "auto" if attention == "layer" else attention)
        if attention == "layer":
            shape = LayerConfig(embed_dim=config.dim, num_heads=config.heads, ffn_dim=4 * config.dim)
            other.blocks = nn.Sequential(*(TransformerLayer(shape) for _ in range(config.depth)))
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval().requires_grad_(False)


def times(calls: Calls, device: torch.device, runs: int, seconds: float) -> dict[str, Line]:
    """Of all in one race, in which what is slow runs less often than `runs`, but three times at least."""
    entrants = {name: timing.Entrant(of) for name, of in calls.items()}
    found = timing.race(entrants, device, runs, seconds)
    return {
        name: {"ms": t.ms, "spread": t.spread, "runs": t.runs, "sets": len(calls[name])}
        for name, t in found.items()
    }


def sets_for(bytes_of_a_set: int, device: torch.device) -> int:
    return timing.sets_past_cache(bytes_of_a_set) if device.type == "cuda" else 1


def attention_calls(
    model: ViT, batch: int, dtype: torch.dtype, device: torch.device, kernels: list[str]
) -> Any:
    """On as many sets of q, k and v as it takes for each to have left the L2 when it comes round again."""
    config = model.config
    shape = (batch, config.tokens, 3, config.heads, config.dim // config.heads)
    count = sets_for(math.prod(shape) * dtype.itemsize, device)
    sets = [torch.randn(shape, device=device, dtype=dtype) for _ in range(count)]
    inputs = [one.permute(2, 0, 3, 1, 4) for one in sets]
    calls: Calls = {"torch": [partial(F.scaled_dot_product_attention, *qkv) for qkv in inputs]}
    for kernel in kernels:
        calls[kernel] = [partial(tilewise.attention, *qkv, kernel=kernel) for qkv in inputs]
    return able(calls)


def model_calls(model: ViT, batch: int, dtype: torch.dtype, device: torch.device, kernels: list[str]) -> Any:
    pixels = model.config.image_size
    images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
    calls: Calls = {
        "torch": [partial(pytorchs(with_attention(model, "sdpa")), images)],
        "torch + auto": [partial(pytorchs(with_attention(model, "auto")), images)],
    }
    for kernel in (*kernels, "layer"):
        calls[kernel] = [partial(with_attention(model, kernel), images)]
    return able(calls)


def able(calls: Calls) -> tuple[Calls, dict[str, str]]:
    """Those that take the problem, and why the others do not."""
    reasons = {}
    for name in list(calls):
        try:
            calls[name][0]()
        except tilewise.Error as error:
            reasons[name] = refusal(str(error), name)
            del calls[name]
    return calls, reasons


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pixels", type=listed(whole(16)), default="224,384,512")
    parser.add_argument("--batch", type=whole(1), default=32)
    parser.add_argument("--depth", type=whole(1), default=12, help="layers")
    parser.add_argument("--dtype", default="bf16,f32")
    parser.add_argument("--kernels", help="instead of all that the device can run")
    runs = whole(timing.SLOW_RUNS)
    parser.add_argument("--runs", type=runs, default=20, help="on a GPU; what is slow has 3")
    parser.add_argument("--seconds", type=number(0), default=1.0, help="for each, on a CPU")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=Path("results"))
    asked = parser.parse_args(given)
    for name in asked.dtype.split(","):
        if name not in DTYPES:
            parser.error(f"--dtype: expected some of {', '.join(DTYPES)}, got {name}")
    try:
        measure(asked)
    except (BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None


def measure(asked: argparse.Namespace) -> None:
    device = environment.choose_device(asked.device)
    known = kernels_on(device)
    usable = [name for name, verdict in known.items() if verdict == "usable"]
    kernels = ["auto", *(name for name in usable if name != "reference")]
    if asked.kernels:
        kernels = asked.kernels.split(",")
        suites.check_each("--kernels", kernels, ("auto", *known))
    described = environment.describe(device)
    path = asked.out / environment.slug(described) / "vit-model.jsonl"
    writer = Writer(path, described, (), fresh=True)
    torch.manual_seed(0)
    with torch.inference_mode(), timing.precision(tf32=False):
        for name in asked.dtype.split(","):
            for pixels in asked.pixels:
                model = base_16(pixels, asked.depth, device).to(DTYPES[name])
                arguments = (asked.batch, DTYPES[name], device, kernels)
                for op, (calls, reasons) in (
                    ("vit attention", attention_calls(model, *arguments)),
                    ("vit model", model_calls(model, *arguments)),
                ):
                    base = {"suite": "vit-model", "op": op, "device": device.type, "dtype": name}
                    base |= {"batch": asked.batch, "depth": asked.depth}
                    base |= {"pixels": pixels, "tokens": model.config.tokens}
                    lines = times(calls, device, asked.runs, asked.seconds)
                    lines |= {impl: {"skipped": reason} for impl, reason in reasons.items()}
                    for impl, figures in lines.items():
                        writer.add(base | {"impl": impl} | figures)
                    shown = {impl: round(x["ms"], 4) if "ms" in x else "-" for impl, x in lines.items()}
                    print(f"{op}, {name}, {pixels} px, ms: {shown}", flush=True)
    writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    print(f"record: {path}")


if __name__ == "__main__":
    main()
