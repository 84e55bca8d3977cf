"""Weights as safetensors, and checkpoints to go on from after an interrupt."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from data import Missing
from model import ViT, ViTConfig


def check_package() -> None:
    """Before a training, rather than after it."""
    if importlib.util.find_spec("safetensors") is None:
        raise Missing("the package for weights is not here: pip install safetensors")


def save(path: Path, model: ViT) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"config": json.dumps(asdict(model.config))})


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
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise Missing(f"{path}: expected weights that train.py saved: {error}") from None
    model = ViT(config, attention)
    model.load_state_dict(tensors)
    return model


def checkpoint(
    path: Path,
    model: ViT,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    history: list[dict[str, float]],
) -> None:
    """Written beside and renamed, so that an interrupt leaves the one before."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": asdict(model.config),
        "settings": settings,
        "history": history,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def resume(
    path: Path, model: ViT, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> list[dict[str, float]]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    there, here = state["config"] | state["settings"], asdict(model.config) | settings
    for name in here:
        if there[name] != here[name]:
            raise Missing(
                f"{path} was made with {name} {there[name]}, and here it is {here[name]}: "
                "give another --out, or remove it"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]
