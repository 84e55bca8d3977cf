"""Projections that lie together in memory."""

from __future__ import annotations

import copy
import doctest
import io

import pytest
import tilewise.nn
import torch
from tilewise.nn import joint as module
from tilewise.nn.joint import joint, lay_together
from torch import Tensor, nn

SMALL = {"embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 96}


def layer(name: str = "llama-2-7b") -> tilewise.nn.TransformerLayer:
    changes = SMALL if name.startswith("llama") else SMALL | {"num_kv_heads": 4}
    return tilewise.nn.TransformerLayer(name, **changes).requires_grad_(False)


def weights(attention: nn.Module) -> list[Tensor]:
    return [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]


def test_examples() -> None:
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted > 0


@pytest.mark.parametrize("name", ["llama-2-7b", "vit-b/16"])
def test_one_product_gives_what_three_give(name: str) -> None:
    one = layer(name)
    x = torch.randn(2, 10, 64)
    apart = copy.deepcopy(one)
    for part in (apart.attention.q_proj, apart.attention.k_proj, apart.attention.v_proj):
        part.weight.data = part.weight.data.clone()
    assert joint(*weights(one.attention)) is not None and joint(*weights(apart.attention)) is None
    torch.testing.assert_close(one(x), apart(x))


def test_weights_stay_together_when_moved_cast_or_loaded() -> None:
    one = layer()
    stored = io.BytesIO()
    torch.save(one.state_dict(), stored)
    stored.seek(0)
    for moved in (one.to(torch.float64), one.half(), one.float()):
        assert joint(*weights(moved.attention)) is not None
    one.load_state_dict(torch.load(stored))
    assert joint(*weights(one.attention)) is not None


def test_gradients_reach_each_projection() -> None:
    one = layer().requires_grad_()
    one(torch.randn(2, 10, 64)).sum().backward()
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in weights(one.attention))


def test_layers_that_do_not_fit_are_left_alone() -> None:
    layers = [nn.Linear(4, 3), nn.Linear(5, 3)]
    before = [x.weight.clone() for x in layers]
    lay_together(*layers)
    assert all(torch.equal(x.weight, b) for x, b in zip(layers, before, strict=True))
    assert joint(layers[0].bias, layers[1].bias) is not None  # biases do fit
