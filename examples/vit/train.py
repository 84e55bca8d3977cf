"""Trains a ViT: python examples/vit/train.py [--data FOLDER] [--attention auto|sdpa|KERNEL] [--out FOLDER]

Fashion-MNIST by default, CIFAR-10 when its folder is given. Without options the model is small, and a CPU
trains it in minutes; for a GPU: --patch 4 --dim 192 --depth 6 --heads 3 --epochs 20 --batch 256 --lr 1e-3.

The same seed gives the same initial weights and the same order of images, whatever computes attention. Ctrl-C
keeps the epochs that are done, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
import torch.nn.functional as F
import weights
from data import Images, Missing, augmented, drawn, load, normalised
from model import ViT, ViTConfig
from tilewise.bench import environment
from tilewise.bench.options import number, whole
from tilewise.bench.problem import BadInput

Progress = Callable[[str, bool], None]


@dataclass(frozen=True)
class Settings:
    epochs: int = 6
    batch: int = 128
    lr: float = 2e-3
    weight_decay: float = 0.05
    warm_up: float = 0.1  # of all steps
    seed: int = 0
    precision: str = "f32"

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()


def config_for(
    images: Images, patch: int | None = None, dim: int = 64, depth: int = 4, heads: int = 4
) -> ViTConfig:
    """A patch has a quarter of the image's side, unless another is given."""
    _, channels, _, size = images.pixels.shape
    classes = int(images.labels.max()) + 1
    patch = max(1, size // 4) if patch is None else patch
    if size % patch != 0:  # or a border of the image would not be seen
        raise Missing(f"--patch: expected a divisor of {size}, the side of an image, got {patch}")
    return ViTConfig(size, patch, channels, classes, dim, depth, heads)


def make_model(config: ViTConfig, attention: str, seed: int, device: torch.device) -> ViT:
    torch.manual_seed(seed)  # on the CPU, so that every device begins alike
    return ViT(config, attention).to(device)


def make_optimizer(model: ViT, settings: Settings) -> torch.optim.AdamW:
    """AdamW; biases, norms and embeddings do not decay."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "token" not in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused)


def learning_rate(settings: Settings, progress: float) -> float:
    """Linear warm-up, then a cosine to 0; progress from 0 to 1."""
    if progress < settings.warm_up:
        return settings.lr * progress / settings.warm_up
    rest = (progress - settings.warm_up) / (1 - settings.warm_up)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * rest))


def train_epoch(
    model: ViT,
    optimizer: torch.optim.Optimizer,
    images: Images,
    settings: Settings,
    epoch: int,
    say: Progress = lambda text, kept: None,
) -> float:
    """One pass over the images; the mean loss."""
    model.train()
    device = images.pixels.device
    order, moves = drawn(len(images.labels), settings.seed, epoch, device)
    steps = len(order) // settings.batch or 1
    total = torch.zeros((), device=device)
    begin = time.perf_counter()
    for step in range(steps):
        rows = order[step * settings.batch : (step + 1) * settings.batch]
        rate = learning_rate(settings, (epoch + (step + 1) / steps) / settings.epochs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with settings.autocast(device):
            logits = model(normalised(augmented(images.pixels[rows], moves[rows])))
        loss = F.cross_entropy(logits.float(), images.labels[rows], label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
        left = steps * (settings.epochs - epoch) - step - 1
        minutes = left * (time.perf_counter() - begin) / (step + 1) / 60
        where = f"epoch {epoch + 1}/{settings.epochs}, step {step + 1}/{steps}"
        say(f"{where}, {minutes:.1f} minutes left", False)
    return total.item() / steps


@torch.inference_mode()
def accuracy(model: ViT, images: Images, settings: Settings, batch: int = 1000) -> float:
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.labels.device)
    with settings.autocast(images.labels.device):
        for first in range(0, len(images.labels), batch):
            rows = slice(first, first + batch)
            found = model(normalised(images.pixels[rows])).argmax(1)
            right += (found == images.labels[rows]).sum()
    return right.item() / len(images.labels)


def shown(text: str, kept: bool) -> None:
    """On a terminal, one line that changes; else the lines that are kept."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if kept else "", file=sys.stderr, flush=True)
    elif kept:
        print(text, flush=True)


def fit(
    model: ViT,
    train: Images,
    test: Images,
    settings: Settings,
    checkpoint: Path | None = None,
    say: Progress = shown,
) -> list[dict[str, float]]:
    """Trains to the end, from the checkpoint on where there is one; loss, accuracy and seconds an epoch."""
    optimizer = make_optimizer(model, settings)
    made_with = asdict(settings) | {"images": len(train.labels)}
    history: list[dict[str, float]] = []
    if checkpoint is not None and checkpoint.exists():
        history = weights.resume(checkpoint, model, optimizer, made_with)
        say(f"going on after epoch {len(history)} of {checkpoint}", True)
    for epoch in range(len(history), settings.epochs):
        start = time.perf_counter()
        loss = train_epoch(model, optimizer, train, settings, epoch, say)
        seconds = time.perf_counter() - start
        history.append({"loss": loss, "accuracy": accuracy(model, test, settings), "seconds": seconds})
        if checkpoint is not None:
            weights.checkpoint(checkpoint, model, optimizer, made_with, history)
        now = history[-1]
        say(
            f"epoch {epoch + 1}/{settings.epochs}  loss {now['loss']:.4f}  "
            f"accuracy {now['accuracy']:.2%}  {now['seconds']:.1f} s",
            True,
        )
    return history


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST or CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("build/vit"), help="where weights are put")
    parser.add_argument("--attention", default="auto", help="auto, sdpa, or a kernel of Tilewise")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    parser.add_argument("--precision", choices=("f32", "bf16"), help="bf16 on a GPU, else f32")
    parser.add_argument("--images", type=whole(1), help="train on the first so many alone")
    parser.add_argument(
        "--patch", type=whole(1), help="its side in pixels; a quarter of the image's by default"
    )
    for name, default in (("dim", 64), ("depth", 4), ("heads", 4)):
        parser.add_argument(f"--{name}", type=whole(1), default=default)
    for name, least in (("epochs", 0), ("batch", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=whole(least), default=getattr(Settings, name))
    parser.add_argument("--lr", type=number(0), default=Settings.lr)
    parser.add_argument("--half", action="store_true", help="save the weights in f16")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    settings = Settings(epochs=asked.epochs, batch=asked.batch, lr=asked.lr, seed=asked.seed)
    try:
        device = environment.choose_device(asked.device)
        precision = asked.precision or ("bf16" if device.type == "cuda" else "f32")
        settings = replace(settings, precision=precision)
        weights.check_package()
        train, test = load(asked.data)
        train, test = train.first(asked.images).to(device), test.to(device)
        config = config_for(train, asked.patch, asked.dim, asked.depth, asked.heads)
        model = make_model(config, asked.attention, settings.seed, device)
        weights.make_folder(asked.out)
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count:,} weights, {len(train.labels):,} images, {settings.epochs} epochs on {device}",
            flush=True,
        )
        fit(model, train, test, settings, asked.out / f"{asked.attention}.checkpoint.pt")
        path = asked.out / f"{asked.attention}.safetensors"
        weights.save(path, model, asked.half)
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted: the same command goes on after the last whole epoch") from None
    except (Missing, BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None
    print(f"weights: {path}; next: python examples/vit/infer.py --weights {path}")


if __name__ == "__main__":
    main()
