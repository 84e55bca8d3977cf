"""The contract's bound on errors: at most twice those of PyTorch's own arithmetic in the same precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DRAWS = 64

Tensors = dict[str, Tensor]


def moved(x: Tensor, seed: int) -> Tensor:
    """Values of the same type, each about a thousandth off: the same problem, with roundings drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    wide = x.detach().double().cpu()
    unit = torch.finfo(x.dtype).eps * torch.exp2(torch.frexp(wide).exponent - 1)
    noise = torch.rand(2, *x.shape, generator=generator, dtype=torch.float64) - 0.5
    return (wide * (1 + 2**-9 * noise[0]) + unit * noise[1]).to(x.dtype).to(x.device)


def assert_twice(actual: Tensors, draw: Callable[[int], tuple[Tensors, Tensors]]) -> None:
    """The largest and the root mean square error of each tensor are at most twice those of PyTorch.

    draw(0) gives what is exact, in float64, and what PyTorch makes of it; draw(n) the same of a problem next
    to it. PyTorch's errors are a matter of luck where they are few. So what misses the bound is measured once
    more against the worst of several draws. Half a unit in the last place, by which every result is rounded,
    is allowed in any case.
    """
    exact, plain = draw(0)
    worst: Tensors = {}
    draws = 0

    def learn(exact: Tensors, plain: Tensors) -> None:
        nonlocal draws
        draws += 1
        for name, value in plain.items():
            found = errors(value.to(actual[name].dtype), exact[name])
            worst[name] = torch.maximum(worst.get(name, found), found)

    learn(exact, plain)
    for name, value in actual.items():
        assert value.shape == exact[name].shape, name
        infinite = exact[name].isinf()
        assert torch.equal(value.double()[infinite], exact[name][infinite]), f"{name}: infinities differ"
        error, least = errors(value, exact[name]), half_units(exact[name], value.dtype)
        while not (error <= torch.maximum(2 * worst[name], least)).all() and draws < DRAWS:
            for n in range(draws, 2 * draws):
                learn(*draw(n))
        allowed = torch.maximum(2 * worst[name], least)
        for kind, is_, may in zip(("largest", "mean"), error.tolist(), allowed.tolist(), strict=True):
            assert is_ <= may, f"{name}: {kind} error {is_:.3g}, at most {may:.3g} allowed"


def errors(actual: Tensor, exact: Tensor) -> Tensor:
    """The largest and the root mean square."""
    finite = exact.isfinite()
    return sizes((actual.double() - exact)[finite])


def half_units(exact: Tensor, dtype: torch.dtype) -> Tensor:
    finite = exact[exact.isfinite()]
    unit = torch.exp2(torch.frexp(finite).exponent - 1.0).clamp(min=torch.finfo(dtype).tiny)
    return sizes(torch.where(finite == 0, 0.0, unit * torch.finfo(dtype).eps / 2))


def sizes(x: Tensor) -> Tensor:
    return torch.stack([x.abs().amax(), x.square().mean().sqrt()]) if x.numel() else x.new_zeros(2)
