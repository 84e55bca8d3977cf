"""Vision Transformers of other packages, switched over: logits and gradients against their own attention.

The bound is the contract's: at most twice the error of theirs in f32, errors being the distance to float64.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from conftest import assert_within_contract
from tilewise.integrations import sdpa, vit_pytorch
from torch import Tensor, nn

IMAGES = (3, 3, 32, 32)


def imported(name: str) -> Any:
    """The module, or a skip that says why not."""
    pytest.importorskip(name.partition(".")[0], reason=f"{name.partition('.')[0]} is not installed")
    pytest.importorskip(
        "torchvision", reason="torchvision, which it imports, is not installed", exc_type=Exception
    )
    return importlib.import_module(name)


def results(
    model: nn.Module, images: Tensor, scope: Callable[[], Any] = contextlib.nullcontext
) -> list[Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    with scope():
        logits = model(images)
        logits = getattr(logits, "logits", logits)
        logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check(theirs: nn.Module, ours: nn.Module, scope: Callable[[], Any] = contextlib.nullcontext) -> None:
    images = torch.randn(IMAGES)
    exact = results(copy.deepcopy(theirs).double(), images.double())
    math, found = results(theirs, images), results(ours, images, scope)
    names = ["logits", *(f"gradient of {name}" for name, _ in theirs.named_parameters())]
    for name, *tensors in zip(names, found, exact, math, strict=False):
        assert_within_contract(name, *tensors)
    assert len(found) == len(exact) == len(math)


def test_hugging_face_by_one_line() -> None:
    hf = pytest.importorskip("transformers")
    from tilewise.integrations import transformers as integration

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = hf.ViTConfig(image_size=32, patch_size=8, num_labels=7, **sizes)
    theirs = hf.ViTForImageClassification._from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(theirs)
    integration.register()
    ours.set_attn_implementation("tilewise")
    check(theirs, ours)


def test_timm_by_one_line() -> None:
    timm = imported("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}
    theirs = timm.models.vision_transformer.VisionTransformer(**sizes).eval()
    check(theirs, copy.deepcopy(theirs), sdpa.use)
    assert sdpa.calls()["tilewise, in place of torch's function"] == 2


@pytest.mark.parametrize("kind", ["vit", "simple_vit"])
def test_vit_pytorch_by_one_line(kind: str) -> None:
    module = imported(f"vit_pytorch.{kind}")
    make = module.ViT if kind == "vit" else module.SimpleViT
    theirs = make(image_size=32, patch_size=8, num_classes=7, dim=48, depth=2, heads=3, mlp_dim=96).eval()
    ours = copy.deepcopy(theirs)
    assert vit_pytorch.switch(ours) == 2
    check(theirs, ours)


def test_vit_pytorch_by_sdpa() -> None:
    module = imported("vit_pytorch.vivit")
    sizes = {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 7}
    depths = {"dim": 48, "spatial_depth": 1, "temporal_depth": 1, "heads": 3, "mlp_dim": 96}
    theirs = module.ViViT(**sizes, **depths, use_flash_attn=True).eval()
    video = torch.randn(2, 3, 4, 32, 32)
    exact = copy.deepcopy(theirs).double()(video.double())
    with sdpa.use():
        found = theirs(video)
    assert sdpa.calls()["tilewise, in place of torch's function"] == 2
    assert_within_contract("logits", found, exact, theirs(video))


class Attention(nn.Module):
    """A layer with vit-pytorch's parts, for `switch` where vit-pytorch is not installed."""

    __module__ = "vit_pytorch.vit"

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(0.0)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (r.unflatten(-1, (self.heads, -1)).transpose(1, 2) for r in rows)
        weights = self.dropout((q @ k.mT * self.scale).softmax(-1))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


def test_switch_replaces_layers_in_place() -> None:
    head = [nn.Flatten(2), nn.Linear(32 * 32, 48)]
    theirs = nn.Sequential(*head, Attention(48, 3), Attention(48, 4))
    ours = copy.deepcopy(theirs)
    assert vit_pytorch.switch(ours) == 2
    assert list(ours.state_dict()) == list(theirs.state_dict())
    check(theirs, ours)
    assert vit_pytorch.switch(copy.deepcopy(ours)) == 2


def test_switch_refuses_a_model_without_such_layers() -> None:
    with pytest.raises(tilewise.InvalidArgument, match=r"model: expected an Attention of vit_pytorch\.vit"):
        vit_pytorch.switch(nn.Linear(2, 2))
