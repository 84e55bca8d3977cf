"""Weights as safetensors, and checkpoints to go on from after an interrupt."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from data import Missing
from model import ViT, ViTConfig
from torch import Tensor

TRAINED = Path(__file__).with_name("fashion-mnist.safetensors")  # by train.py --half


def check_package() -> None:
    """Before a training, rather than after it."""
    if importlib.util.find_spec("safetensors") is None:
        raise Missing("the package for weights is not here: pip install safetensors")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write under; what is there takes the place of the path when it is whole, so that an
    interrupt or a full disk leaves the one before."""
    partial = path.with_suffix(".partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise Missing(f"--out: cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def save(path: Path, model: ViT, half: bool = False) -> None:
    """In f32, or in f16 and so half the size."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    dtype = torch.float16 if half else torch.float32
    tensors = {name: x.detach().to("cpu", dtype).contiguous() for name, x in model.state_dict().items()}
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata={"config": json.dumps(asdict(model.config))})
        except SafetensorError as error:  # its word for what the system says, too
            raise OSError(str(error)) from None


def load(path: Path, attention: str) -> ViT:
    """The model that was saved, with whatever attention."""
    check_package()
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise Missing(f"{path}: no weights there; train.py makes them, --weights says where they are")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = ViTConfig(**json.loads(metadata["config"]))
        for name, value in asdict(config).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise Missing(f"{path}: expected weights that train.py saved: {error}") from None
    model = ViT(config, attention)
    check_tensors(path, tensors, model)
    model.load_state_dict(tensors)
    return model


def check_tensors(path: Path, found: dict[str, Tensor], model: ViT) -> None:
    """Names the first tensor that is not the model's."""
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        there, here = (list(x[name].shape) if name in x else "none" for x in (found, wanted))
        if there != here:
            raise Missing(
                f"{path}: expected weights that train.py saved: of {name} expected {here}, got {there}"
            )


def make_folder(path: Path) -> None:
    """Before a training, too."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Missing(f"--out: cannot make {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise Missing(f"--out: cannot write in {path}: no permission")


def checkpoint(
    path: Path,
    model: ViT,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    history: list[dict[str, float]],
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": asdict(model.config),
        "settings": settings,
        "history": history,
    }
    content = io.BytesIO()  # of a full disk, torch.save would not say so
    torch.save(state, content)
    with replacing(path) as partial:
        partial.write_bytes(content.getbuffer())


def resume(
    path: Path, model: ViT, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> list[dict[str, float]]:
    otherwise = "give another --out, or remove it"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        there, here = state["config"] | state["settings"], asdict(model.config) | settings
    except Exception:  # torch has many reasons
        raise Missing(f"{path}: no checkpoint of train.py, or one that is damaged: {otherwise}") from None
    for name in here:
        if name not in there:
            raise Missing(f"{path} does not say of what {name} it was made: {otherwise}")
        if there[name] != here[name]:
            raise Missing(
                f"{path} was made with {name} {there[name]}, and here it is {here[name]}: {otherwise}"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]
