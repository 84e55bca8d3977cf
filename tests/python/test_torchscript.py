"""torch.jit.trace of Tilewise: results and gradients of other inputs than were traced, saved and loaded.

torch.jit.script is refused in one sentence.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from tilewise import _ops, nn
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # TorchScript itself
]

SEED = 20261118
SMALL = {"embed_dim": 32, "num_heads": 4, "head_dim": 8, "ffn_dim": 48}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window and softcap": {"window": (3, 0), "softcap": 5.0},
    "deterministic": {"deterministic": True},
    "batch invariant": {"batch_invariant": True},
}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Attention": lambda: nn.Attention(32, 4, num_kv_heads=2, is_causal=True),
    "MultiheadAttention": lambda: SelfAttention(),
    "FeedForward": lambda: nn.FeedForward(32, 48),
    "GatedFeedForward": lambda: nn.GatedFeedForward(32, 48),
    "LayerNorm": lambda: nn.LayerNorm(32),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "Llama's layer": lambda: nn.TransformerLayer("llama-2-7b", num_kv_heads=2, **SMALL),
    "ViT's layer": lambda: nn.TransformerLayer("vit-b/16", num_kv_heads=4, **SMALL),
}


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def rows(length: int, *, gradient: bool) -> list[Tensor]:
    return [torch.randn(2, 4, length, 8, requires_grad=gradient) for _ in range(3)]


def reloaded(traced: Any) -> Any:
    content = io.BytesIO()
    torch.jit.save(traced, content)
    content.seek(0)
    return torch.jit.load(content)


def check_same(traced: Any, call: Any, inputs: list[Tensor], others: list[Tensor]) -> None:
    """The same output, and the same gradients of inputs and `others`, whose trace has copies."""
    ours, theirs = traced(*inputs), call(*inputs)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    weight = torch.randn_like(theirs)
    names = dict(traced.named_parameters()) if isinstance(traced, torch.nn.Module) else {}
    found = torch.autograd.grad((ours * weight).sum(), [*inputs, *names.values()])
    expected = torch.autograd.grad((theirs * weight).sum(), [*inputs, *others])
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("gradient", [True, False], ids=["traced with gradients", "without"])
@pytest.mark.parametrize("known", [True, False], ids=["after a call", "first of all"])
def test_attention_is_traced_with_its_gradients(name: str, gradient: bool, known: bool) -> None:
    torch.manual_seed(SEED)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, **OPTIONS[name])

    _ops.plain_calls.clear()
    if known:
        attend(*rows(6, gradient=True))
    traced = torch.jit.trace(attend, tuple(rows(6, gradient=gradient)))
    for call in (traced, reloaded(traced)):
        check_same(call, attend, rows(9, gradient=True), [])


def test_a_mask_is_traced_with_its_gradient() -> None:
    torch.manual_seed(SEED)
    given = [*rows(6, gradient=True), torch.randn(6, 6, requires_grad=True)]
    traced = torch.jit.trace(tilewise.attention, tuple(given))
    check_same(
        reloaded(traced), tilewise.attention, [torch.randn_like(x).requires_grad_() for x in given], []
    )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("gradient", [True, False], ids=["traced with gradients", "without"])
def test_modules_are_traced_with_their_gradients(name: str, gradient: bool) -> None:
    torch.manual_seed(SEED)
    module = MODULES[name]()
    with torch.set_grad_enabled(gradient):
        traced = torch.jit.trace(module, (torch.randn(2, 6, 32),))
    for call in (traced, reloaded(traced)):
        check_same(call, module, [torch.randn(3, 9, 32, requires_grad=True)], list(module.parameters()))


def test_a_trace_draws_dropout_anew() -> None:
    torch.manual_seed(SEED)
    q, k, v = rows(16, gradient=True)
    traced = torch.jit.trace(
        lambda q, k, v: tilewise.attention(q, k, v, dropout_p=0.5), (q, k, v), check_trace=False
    )
    torch.manual_seed(1)
    first, second = traced(q, k, v), traced(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(traced(q, k, v), first) and not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(tilewise.attention(q, k, v, dropout_p=0.5), first)


def call_attention(q: Tensor) -> Tensor:
    return tilewise.attention(q, q, q)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.attention = nn.Attention(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x))


SCRIPTED: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: tilewise.attention, "tilewise.attention"),
    "a function that calls it": (lambda: call_attention, "tilewise.attention"),
    "a layer's function": (lambda: tilewise.rms_norm, "tilewise.rms_norm"),
    "a module": (
        lambda: nn.TransformerLayer("vit-b/16", num_kv_heads=4, **SMALL),
        "tilewise.nn.TransformerLayer",
    ),
    "torch's module replaced": (lambda: SelfAttention(), "tilewise.nn.MultiheadAttention"),
    "a module that has one": (lambda: Model(), "tilewise.nn.Attention"),
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripting_is_refused_in_a_sentence(name: str) -> None:
    make, named = SCRIPTED[name]
    with pytest.raises(tilewise.Unsupported) as caught:
        torch.jit.script(make())
    assert str(caught.value) == (
        f"{named} cannot be scripted: use torch.jit.trace, torch.compile or torch.export"
    )
