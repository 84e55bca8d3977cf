"""Accuracy and speed of trained weights: python examples/vit/infer.py [--weights FILE] [--attention NAME]

Works at once: the weights beside this file are of a training by train.py, and where Debian's Fashion-MNIST is
not installed, the images are the 200 beside this file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import data
import torch
import weights
from data import Images, Missing, normalised
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


def images_of(folder: Path | None) -> tuple[Images, str]:
    """Images to test on, and what they are."""
    if folder is None and not data.is_fashion_mnist(data.FASHION_MNIST):
        wanted = "apt-get install dataset-fashion-mnist for all 10,000"
        return data.load_test(data.SAMPLE), f"200 images of Fashion-MNIST in {data.SAMPLE} ({wanted})"
    folder = data.FASHION_MNIST if folder is None else folder
    return data.load_test(folder), f"{data.name_of(folder)} in {folder}"


@torch.inference_mode()
def answers(model: ViT, images: Images, settings: Settings) -> str:
    """What the model sees in each image, one line per image."""
    device = images.pixels.device
    with settings.autocast(device):
        logits = model(normalised(images.pixels)).float()
    shares, found = logits.softmax(1).max(1)
    known = len(data.CLASSES) == model.config.classes and model.config.channels == 1
    name = (lambda n: data.CLASSES[n]) if known else (lambda n: f"class {n}")
    rows = zip(found.tolist(), shares.tolist(), images.labels.tolist(), strict=True)
    return "\n".join(
        f"image {n}: {name(seen)} ({share:.0%}), "
        + ("right" if seen == label else f"wrong, it is {name(label)}")
        for n, (seen, share, label) in enumerate(rows)
    )


def check_images(model: ViT, images: Images) -> None:
    config = model.config
    expected = f"{config.channels} x {config.image_size} x {config.image_size}"
    if images.shape != expected:
        raise Missing(f"--data: the weights are for images of {expected}, and these are {images.shape}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--weights", type=Path, default=weights.TRAINED, help="those of a training by train.py"
    )
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST or CIFAR-10")
    parser.add_argument("--attention", default="auto", help="auto, sdpa, or a kernel of Tilewise")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    parser.add_argument("--precision", choices=("f32", "bf16"), help="bf16 on a GPU, else f32")
    parser.add_argument(
        "--show", type=whole(0), default=5, help="so many images, and what they are taken for"
    )
    parser.add_argument("--batch", type=whole(1), default=256)
    parser.add_argument("--seconds", type=number(0), default=2.0, help="for the throughput")
    asked = parser.parse_args(given)
    try:
        device = environment.choose_device(asked.device)
        precision = asked.precision or ("bf16" if device.type == "cuda" else "f32")
        settings = Settings(precision=precision)
        model = weights.load(asked.weights, asked.attention)
        test, source = images_of(asked.data)
        check_images(model, test)
        model, test = model.to(device).eval(), test.to(device)
        print(f"weights: {asked.weights}\nimages: {source}")
        batch = min(asked.batch, len(test.labels))
        print(explanation(model, asked.attention, batch, device, precision))
        if asked.show:
            print(answers(model, test.first(asked.show), settings))
        print(f"accuracy: {accuracy(model, test, settings):.2%} of {len(test.labels)} images")
        rate = images_a_second(model, test, settings, asked.batch, asked.seconds)
        print(f"throughput: {rate:.0f} images/s in batches of {batch}")
    except (Missing, BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None


if __name__ == "__main__":
    main()
