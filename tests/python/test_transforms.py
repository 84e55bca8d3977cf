"""torch.func on the operations around attention: gradients and vmap are right, forward mode is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tilewise
import torch
import torch.nn.functional as F
from tilewise import Unsupported
from torch import Tensor
from torch.autograd import forward_ad

UP, DOWN, WEIGHT = torch.randn(16, 8), torch.randn(8, 16), torch.rand(8)
TABLES = tilewise.rope_tables(5, 8)


def turned(x: Tensor) -> Tensor:
    heads = x.view(1, 1, 5, 8)
    return tilewise.apply_rope(heads, None, *TABLES).view(5, 8)


def turned_by_torch(x: Tensor) -> Tensor:
    cos, sin = TABLES
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


# Ours and torch's own, of [5, 8].
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (lambda x: tilewise.linear(x, UP, activation="gelu"), lambda x: F.gelu(x @ UP.T)),
    "ffn": (lambda x: tilewise.ffn(x, UP, DOWN), lambda x: F.gelu(x @ UP.T) @ DOWN.T),
    "ffn that keeps": (
        lambda x: tilewise.ffn(x, UP, DOWN, keep_products=True),
        lambda x: F.gelu(x @ UP.T) @ DOWN.T,
    ),
    "rms_norm": (
        lambda x: tilewise.rms_norm(x, WEIGHT, 1e-5),
        lambda x: F.rms_norm(x, (8,), WEIGHT, 1e-5),
    ),
    "layer_norm": (lambda x: tilewise.layer_norm(x, WEIGHT), lambda x: F.layer_norm(x, (8,), WEIGHT)),
    "apply_rope": (turned, turned_by_torch),
}


@pytest.mark.parametrize("name", PAIRS)
def test_grad_and_vmap_are_right(name: str) -> None:
    ours, theirs = PAIRS[name]
    x, many = torch.randn(5, 8), torch.randn(3, 5, 8)

    def derivative(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.func.grad(lambda x: call(x).square().sum())

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)

    close(derivative(ours)(x), derivative(theirs)(x))
    close(torch.vmap(ours)(many), torch.vmap(theirs)(many))
    close(torch.vmap(derivative(ours))(many), torch.vmap(derivative(theirs))(many))
    close(torch.func.jacrev(ours)(x), torch.func.jacrev(theirs)(x))


@pytest.mark.parametrize("name", PAIRS)
def test_forward_mode_is_refused_rather_than_zero(name: str) -> None:
    ours, _ = PAIRS[name]
    x = torch.randn(5, 8)
    with pytest.raises(Unsupported, match="no forward-mode derivative"):
        torch.func.jvp(ours, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(Unsupported, match="no forward-mode derivative"):
        ours(forward_ad.make_dual(x, x))
