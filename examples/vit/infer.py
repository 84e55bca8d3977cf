"""Accuracy and speed of trained weights: python examples/vit/infer.py [--weights FILE] [--attention NAME]"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tilewise
import torch
import weights
from data import Images, Missing, load, normalised
from model import ViT
from tilewise.bench import environment
from tilewise.bench.options import number, whole
from tilewise.bench.problem import BadInput
from train import Settings, accuracy


def explanation(
    model: ViT, attention: str, batch: int, device: torch.device, precision: str, gradient: bool = False
) -> str:
    """What `tilewise explain` says of the model's attention."""
    if attention == "sdpa":
        return "attention by PyTorch's scaled_dot_product_attention"
    config = model.config
    shape = (batch, config.tokens, config.heads, config.dim // config.heads)  # as projections leave it
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.empty(shape, device=device, dtype=dtype, requires_grad=gradient).transpose(1, 2)
    return tilewise.explain(x, x, x, kernel=attention).rstrip()


@torch.inference_mode()
def images_a_second(
    model: ViT, images: Images, settings: Settings, batch: int, seconds: float = 2.0
) -> float:
    """Of batches that are on the device already."""
    device = images.pixels.device
    pixels = normalised(images.pixels[:batch])

    def run(count: int) -> float:
        start = time.perf_counter()
        with settings.autocast(device):
            for _ in range(count):
                model(pixels)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(3)
    count = max(1, int(seconds / max(run(3) / 3, 1e-6)))
    return count * len(pixels) / run(count)


def check_images(model: ViT, images: Images) -> None:
    config = model.config
    expected = f"{config.channels} x {config.image_size} x {config.image_size}"
    if images.shape != expected:
        raise Missing(f"--data: the weights are for images of {expected}, and these are {images.shape}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=Path("build/vit/auto.safetensors"))
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST or CIFAR-10")
    parser.add_argument("--attention", default="auto", help="auto, sdpa, or a kernel of Tilewise")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    parser.add_argument("--precision", choices=("f32", "bf16"), help="bf16 on a GPU, else f32")
    parser.add_argument("--batch", type=whole(1), default=256)
    parser.add_argument("--seconds", type=number(0), default=2.0, help="for the throughput")
    asked = parser.parse_args(given)
    try:
        device = environment.choose_device(asked.device)
        precision = asked.precision or ("bf16" if device.type == "cuda" else "f32")
        settings = Settings(precision=precision)
        model = weights.load(asked.weights, asked.attention)
        test = load(asked.data)[1]
        check_images(model, test)
        model, test = model.to(device).eval(), test.to(device)
        print(explanation(model, asked.attention, asked.batch, device, precision))
        print(f"accuracy: {accuracy(model, test, settings):.2%} of {len(test.labels)} images")
        rate = images_a_second(model, test, settings, asked.batch, asked.seconds)
        print(f"throughput: {rate:.0f} images/s in batches of {min(asked.batch, len(test.labels))}")
    except (Missing, BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None


if __name__ == "__main__":
    main()
