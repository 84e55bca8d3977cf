"""triangle_attention against the same in float64, with the gradients of a bias that rows share."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
import tilewise
import torch
from conftest import assert_within_contract, leaf
from tilewise import triangle_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

N, H, S, D = 13, 3, 29, 32


def plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, with all scores in memory."""
    score = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.where(lse.isinf()[..., None], 0.0, torch.exp(score - lse.clamp(min=-1e30)[..., None]))
    return weight @ value, lse


def problem(batch: int, dtype: torch.dtype, bias_dtype: torch.dtype, device: Any, **sizes: int) -> list[Any]:
    n = {"n": N, "sq": S, "sk": S, "dv": D} | sizes
    mask = torch.rand(batch, n["n"], 1, 1, n["sk"], device=device) < 0.7
    if n["n"] > 1:
        mask[:, 1] = False  # a row that sees nothing
    return [
        leaf(batch, n["n"], H, n["sq"], D, dtype=dtype, device=device),
        leaf(batch, n["n"], H, n["sk"], D, dtype=dtype, device=device),
        leaf(batch, n["n"], H, n["sk"], n["dv"], dtype=dtype, device=device),
        leaf(batch, 1, H, n["sq"], n["sk"], dtype=bias_dtype, device=device),
        mask,
    ]


def results(function: Any, given: list[Any], cast: torch.dtype | None) -> list[Tensor]:
    """Output, LSE, and gradients of query, key, value and, where there is one, bias."""
    leaves = [x.detach().to(cast or x.dtype).requires_grad_() for x in given[:4] if x is not None]
    bias = leaves[3] if given[3] is not None else None
    out, lse = function(*leaves[:3], bias, given[4])
    torch.manual_seed(1)
    cotangent = torch.randn(out.shape, device=out.device).to(given[0].dtype).to(out.dtype)
    return [out, lse, *torch.autograd.grad(out, leaves, cotangent)]


def ours(*given: Any) -> Any:
    return triangle_attention(*given, return_lse=True)


def check(given: list[Any]) -> None:
    wide = torch.float32 if given[0].dtype != torch.float64 else torch.float64
    found = results(ours, given, None), results(plain, given, torch.float64), results(plain, given, wide)
    names = ("out", "lse", "gradient of query", "of key", "of value", "of bias")
    for name, actual, exact, math in zip(names, *found, strict=False):
        precision = given[0].dtype if name == "of bias" else None
        assert_within_contract(name, actual, exact, math, precision)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "mask"])
@pytest.mark.parametrize("wide_bias", [False, True], ids=["own type", "f32 bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_outputs_and_gradients_are_within_the_contract(
    dtype: torch.dtype, wide_bias: bool, masked: bool, batch: int, device: torch.device
) -> None:
    given = problem(batch, dtype, torch.float32 if wide_bias else dtype, device)
    check(given if masked else [*given[:4], None])


@pytest.mark.parametrize("sizes", [{"n": 1}, {"sq": 5}, {"sk": 40, "dv": 16}, {"n": 0}, {"sq": 0}])
def test_it_takes_odd_sizes(sizes: dict[str, int]) -> None:
    check(problem(1, torch.float32, torch.float32, "cpu", **sizes))


def test_it_takes_no_batch_no_bias_and_transposed_rows() -> None:
    q, k, v, bias, mask = problem(0, torch.float32, torch.float32, "cpu")
    assert triangle_attention(q, k, v, bias, mask).shape == (0, N, H, S, D)
    check([*problem(2, torch.float32, torch.float32, "cpu")[:3], None, None])
    q, k, v, bias, mask = problem(1, torch.float32, torch.float32, "cpu", n=S)
    pairs = [x.detach().transpose(1, 3) for x in (q, k, v)]  # columns of the pair representation
    check([*pairs, bias, mask])


def test_the_sum_of_many_rows_is_made_in_f32() -> None:
    """A sum of 700 rows in bf16 would lose most of them: 256 + 1 is 256 there."""
    q, k, v, bias, _ = problem(1, torch.bfloat16, torch.bfloat16, "cpu", n=700, sq=4, sk=4)
    check([q, k, v, bias, None])


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return made


@pytest.mark.parametrize("batch", [1, 2])
def test_the_bias_is_never_expanded(batch: int) -> None:
    given = problem(batch, torch.float32, torch.float32, "cpu", sq=40, sk=40)
    with Largest() as largest:
        triangle_attention(*given).sum().backward()
    assert 0 < largest.elements <= max(given[0].numel(), given[3].numel())


def test_a_bias_that_all_entries_share_is_never_expanded_in_torchs_signature() -> None:
    q, k, v, bias, _ = problem(1, torch.float32, torch.float32, "cpu", sq=40, sk=40)
    exact = results(plain, [q, k, v, bias, None], torch.float64)
    with Largest() as largest:
        out = tilewise.scaled_dot_product_attention(q, k, v, bias)
        torch.manual_seed(1)
        (found,) = torch.autograd.grad(out, [bias], torch.randn(out.shape))
    assert 0 < largest.elements <= max(q.numel(), bias.numel())
    math = results(plain, [q, k, v, bias, None], torch.float32)
    assert_within_contract("gradient of bias", found, exact[-1], math[-1])


WRONG = {
    "rank": ({"query": torch.zeros(2, 3, 4, 5)}, r"query: expected rank 5 \[B, N, H, length, dim\]"),
    "heads": ({"key": torch.zeros(1, N, 2, S, D)}, r"key: expected the B, N and H of query, \[1, 13, 3\]"),
    "bias": ({"bias": torch.zeros(1, N, H, S, S)}, r"bias: expected \[1, 1, 3, 29, 29\], got"),
    "mask": ({"mask": torch.ones(1, N, 1, S, S).bool()}, r"mask: expected \[1, 13, 1, 1, 29\], got"),
    "mask's type": ({"mask": torch.ones(1, N, 1, 1, S)}, "mask: expected torch.bool, got torch.float32"),
    "bias's type": ({"bias": torch.ones(1, 1, H, S, S).bool()}, "bias: expected a floating type, got"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    q, k, v, bias, mask = problem(1, torch.float32, torch.float32, "cpu")
    sound = {"query": q, "key": k, "value": v, "bias": bias, "mask": mask}
    wrong, message = WRONG[name]
    with pytest.raises(tilewise.InvalidArgument, match=message):
        triangle_attention(**(sound | wrong))


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(importlib.import_module("tilewise.triangle"))
    assert found.failed == 0 and found.attempted > 0
