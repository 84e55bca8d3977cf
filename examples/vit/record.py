"""Records what the ViT example does here: python examples/vit/record.py [--data FOLDER] [--out DIR]

A few steps of every kernel; then the whole training with Tilewise and with SDPA, epochs in turn, and
inference, in turns as well. JSON lines in <out>/<machine>/vit-train.jsonl, the environment first
(results/README.md).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from pathlib import Path
from typing import Any

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
from data import Images, Missing, load, name_of
from infer import explanation, images_a_second
from model import ViT, ViTConfig
from tilewise.bench import environment, timing
from tilewise.bench.implementations import kernels_on, refusal, verdicts
from tilewise.bench.options import whole
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Writer
from train import Settings, accuracy, config_for, make_model, make_optimizer, train_epoch

Line = dict[str, Any]
WARM_UP_STEPS = 3
TURNS = 5  # of inference
TURN_SECONDS = 1.0


def chosen(model: ViT, attention: str, settings: Settings, device: torch.device) -> dict[str, str]:
    """The kernel of each pass."""
    if attention == "sdpa":
        return {"forward": "sdpa", "backward": "sdpa"}
    said = explanation(model, attention, settings.batch, device, settings.precision, gradient=True)
    forward, backward = said.split("\nbackward ")
    passes = {"forward": verdicts(forward), "backward": verdicts(backward)}
    return {
        of: next(name for name, verdict in found.items() if verdict == "chosen")
        for of, found in passes.items()
    }


def inference_rates(models: dict[str, ViT], images: Images, settings: Settings) -> dict[str, Line]:
    """Images a second of each, in turns: the median, and the spread between the quartiles over it."""
    rates: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(TURNS):
        for name in timing.rotated(list(models), turn):
            rates[name].append(images_a_second(models[name], images, settings, 1000, TURN_SECONDS))
    found = {}
    for name, of in rates.items():
        kept = timing.summary(of)
        found[name] = {"images_a_second": round(kept.ms), "spread": round(kept.spread, 5), "turns": kept.runs}
    return found


def whole_training(
    config: ViTConfig, train: Images, test: Images, settings: Settings, writer: Writer, base: Line
) -> None:
    device = train.labels.device
    models = {name: make_model(config, name, settings.seed, device) for name in ("auto", "sdpa")}
    optimizers = {name: make_optimizer(model, settings) for name, model in models.items()}
    for epoch in range(settings.epochs):
        for name, model in models.items():
            start = time.perf_counter()
            loss = train_epoch(model, optimizers[name], train, settings, epoch)
            line = {
                "epoch": epoch + 1,
                "seconds": round(time.perf_counter() - start, 4),
                "loss": round(loss, 5),
            }
            found = round(accuracy(model, test, settings), 5)
            writer.add(base | {"op": "epoch", "impl": name} | line | {"accuracy": found})
            print(f"{name:6s} {line} accuracy {found:.2%}", flush=True)
    rates = inference_rates(models, test, settings)
    for name, model in models.items():
        told: Line = {"op": "infer", "impl": name, "kernels": chosen(model, name, settings, device)}
        told |= rates[name]
        writer.add(base | told)
        print(told, flush=True)


def is_refusal(error: RuntimeError, kernel: str) -> bool:
    """Whether a kernel says that it cannot; no fault of the device, nor want of memory."""
    text = str(error)
    told = isinstance(error, tilewise.Unsupported) or text.startswith("tilewise.Unsupported: ")
    return told or kernel in verdicts(text)


def few_steps(
    config: ViTConfig, train: Images, settings: Settings, count: int, kernel: str, base: Line
) -> Line:
    """The time of a step, its host's included, the loss after some, from the same start, and what ran; or
    why not.
    """
    device = train.labels.device
    line = base | {"op": "steps", "impl": kernel}
    model = make_model(config, kernel, settings.seed, device)
    optimizer = make_optimizer(model, settings)
    some = train.first(settings.batch)
    times = []
    try:
        for step in range(count):
            start = time.perf_counter()
            loss = train_epoch(model, optimizer, some, settings, step)  # reads the loss, so it waits
            times.append(1e3 * (time.perf_counter() - start))
    except RuntimeError as error:  # a running backward lets no other through
        if not is_refusal(error, kernel):
            raise
        return line | {"skipped": refusal(str(error), kernel)}
    timed = times[WARM_UP_STEPS:]
    line |= {"ms": round(statistics.median(timed), 4), "steps": count, "timed": len(timed)}
    return line | {"loss": round(loss, 5), "kernels": chosen(model, kernel, settings, device)}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST or CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default=None)
    parser.add_argument("--epochs", type=whole(0), default=12, help="0 leaves the whole training out")
    parser.add_argument(
        "--steps", type=whole(0), default=20, help="of each kernel, timed from the 4th on; 0 leaves them out"
    )
    parser.add_argument("--batch", type=whole(1), default=512)
    parser.add_argument("--patch", type=whole(1), default=2, help="2 makes 197 tokens of Fashion-MNIST")
    parser.add_argument("--images", type=whole(1), help="train on the first so many alone")
    asked = parser.parse_args(given)
    if 0 < asked.steps <= WARM_UP_STEPS:
        parser.error(f"--steps: expected 0, or more than {WARM_UP_STEPS}, got {asked.steps}")
    try:
        record(asked)
    except (Missing, BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None


def record(asked: argparse.Namespace) -> None:
    device = environment.choose_device(asked.device)
    precision = "bf16" if device.type == "cuda" else "f32"
    settings = Settings(epochs=asked.epochs, batch=asked.batch, precision=precision, lr=1.5e-3)
    train, test = (x.to(device) for x in load(asked.data))
    train = train.first(asked.images)
    described = environment.describe(device)
    path = asked.out / environment.slug(described) / "vit-train.jsonl"
    config = config_for(train, asked.patch, dim=192, depth=6, heads=3)
    writer = Writer(path, described, (), fresh=True)
    base: Line = {"suite": "vit-train", "device": device.type, "dtype": precision, "batch": settings.batch}
    base |= {"tokens": config.tokens, "data": name_of(asked.data), "epochs": settings.epochs}
    base |= {"training_images": len(train.labels), "test_images": len(test.labels)}
    usable = [name for name, verdict in kernels_on(device).items() if verdict == "usable"]
    for kernel in ("sdpa", "auto", *usable) if asked.steps else ():
        if kernel == "reference":
            continue  # float64, a kernel to be believed and not waited for
        few = Settings(epochs=asked.steps, batch=settings.batch, precision=precision, lr=1e-3)
        line = few_steps(config, train, few, asked.steps, kernel, base)
        writer.add(line)
        print({key: line[key] for key in line if key not in base}, flush=True)
    if settings.epochs:
        whole_training(config, train, test, settings, writer, base)
    writer.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    print(f"record: {path}")


if __name__ == "__main__":
    main()
