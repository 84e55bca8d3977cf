"""Fashion-MNIST and CIFAR-10 from their usual files, and augmentation on the device they are on."""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
SAMPLE = Path(__file__).with_name("sample")  # the first 200 of its images to test on
CLASSES = (
    *("T-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
SHIFT = 2  # pixels that an image may be moved by, to each side
CIFAR_TRAIN = tuple(f"data_batch_{n}.bin" for n in range(1, 6))
CIFAR_TEST = ("test_batch.bin",)


class Missing(Exception):
    """A file that is not there or not what it should be, and what to do about it."""


@dataclass
class Images:
    """Pixels uint8 [N, channels, S, S] and labels int64 [N]."""

    pixels: Tensor
    labels: Tensor

    @property
    def shape(self) -> str:
        """Of one image."""
        return " x ".join(map(str, self.pixels.shape[1:]))

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))

    def first(self, count: int | None) -> Images:
        return Images(self.pixels[:count], self.labels[:count])


def is_cifar(folder: Path) -> bool:
    return os.path.exists(folder / CIFAR_TEST[0])


def name_of(folder: Path | None) -> str:
    """The set whose files the folder has."""
    return "CIFAR-10" if folder is not None and is_cifar(folder) else "Fashion-MNIST"


def is_fashion_mnist(folder: Path) -> bool:
    return os.path.exists(folder / "t10k-images-idx3-ubyte.gz")


def load(folder: Path | None) -> tuple[Images, Images]:
    """Training and test images: CIFAR-10 or Fashion-MNIST, by the files in the folder."""
    folder = FASHION_MNIST if folder is None else folder
    test = load_test(folder)
    train = _cifar(folder, CIFAR_TRAIN) if is_cifar(folder) else _idx(folder, "train")
    if train.shape != test.shape:
        raise Missing(f"{folder}: images to train on are {train.shape}, to test on {test.shape}")
    return train, test


def load_test(folder: Path) -> Images:
    """Images to test on."""
    if is_cifar(folder):
        return _cifar(folder, CIFAR_TEST)
    if is_fashion_mnist(folder):
        return _idx(folder, "t10k")
    if folder == FASHION_MNIST:
        raise Missing("Fashion-MNIST is not here: apt-get install dataset-fashion-mnist, or --data FOLDER")
    raise Missing(
        f"--data: expected Fashion-MNIST (train-images-idx3-ubyte.gz and the other three) or CIFAR-10's "
        f"binary version (data_batch_1.bin … test_batch.bin) in {folder}, found neither"
    )


def _read(path: Path, magic: bytes) -> bytearray:
    try:
        content = bytearray(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise Missing(f"{path}: cannot read it: {error}") from None
    if content[:4] != magic:
        raise Missing(f"{path}: expected an IDX file that begins with {magic.hex()}, got {content[:4].hex()}")
    return content


def _idx(folder: Path, part: str) -> Images:
    """Four bytes of magic, sizes as big-endian int32, then bytes."""
    pixels = _read(folder / f"{part}-images-idx3-ubyte.gz", b"\0\0\x08\x03")
    labels = _read(folder / f"{part}-labels-idx1-ubyte.gz", b"\0\0\x08\x01")
    count, height, width = (int.from_bytes(pixels[n : n + 4], "big") for n in (4, 8, 12))
    if len(pixels) != 16 + count * height * width or len(labels) != 8 + count:
        raise Missing(f"{folder}: {part} has {count} images of {height} x {width}, but its files do not")
    if count == 0 or height == 0 or height != width:
        raise Missing(f"{folder}: expected square images, {part} has {count} of {height} x {width}")
    images = torch.frombuffer(pixels, dtype=torch.uint8, offset=16).view(count, 1, height, width)
    return Images(images, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long())


def _cifar(folder: Path, names: tuple[str, ...]) -> Images:
    """Records of one byte of label and 3 x 32 x 32 of pixels."""
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise Missing(f"{folder}: {', '.join(missing)} of CIFAR-10's binary version is missing")
    try:
        content = bytearray(b"".join((folder / name).read_bytes() for name in names))
    except OSError as error:
        raise Missing(f"{folder}: cannot read it: {error}") from None
    if not content or len(content) % 3073:
        raise Missing(f"{folder}: expected records of 3073 bytes, got {len(content)} bytes in all")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, 3073)
    return Images(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())


def drawn(count: int, seed: int, epoch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An epoch's order int64 [N], and how images are moved (down, right) and mirrored, int64 [N, 3].

    Drawn on the CPU, so that every device has the same, and moved at once, so that no step waits for it.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    order = torch.randperm(count, generator=generator)
    moves = torch.randint(0, 2 * SHIFT + 1, (count, 3), generator=generator)
    moves[:, 2] = torch.randint(0, 2, (count,), generator=generator)
    return order.to(device), moves.to(device)


def augmented(pixels: Tensor, moves: Tensor) -> Tensor:
    """Each image [B, channels, S, S] moved and mirrored as its row of `moves` says."""
    count, _, size, _ = pixels.shape
    places = torch.arange(size, device=pixels.device)
    rows, columns = (moves[:, n, None] + places for n in (0, 1))
    columns = torch.where(moves[:, 2, None] == 1, columns.flip(1), columns)
    padded = torch.nn.functional.pad(pixels, (SHIFT,) * 4)
    images = torch.arange(count, device=pixels.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def normalised(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1.0
