"""tilewise.nn against PyTorch's own layers with the same weights."""

from __future__ import annotations

import copy
import doctest
import importlib
import pickle
from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import gradients, leaf
from tilewise import nn
from torch import Tensor

E, H, N, L, S = 48, 6, 3, 11, 17


def pair(**options: Any) -> tuple[nn.MultiheadAttention, torch.nn.MultiheadAttention]:
    """Ours and torch's with the same weights, none of them zero."""
    theirs = torch.nn.MultiheadAttention(E, H, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    ours = nn.MultiheadAttention(E, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(
    ours: nn.MultiheadAttention, theirs: torch.nn.MultiheadAttention, rows: list[Tensor], **options: Any
) -> None:
    """Outputs, weights and the gradients of inputs and parameters."""
    results = []
    for module in (ours, theirs):
        inputs = [x.detach().clone().requires_grad_() for x in rows]
        passed = inputs * 3 if len(inputs) == 1 else inputs
        found = [x for x in module(*passed, **options) if x is not None]
        torch.manual_seed(0)
        leaves = [*inputs, *module.parameters()]
        results.append((found, gradients(found, leaves, [torch.randn(x.shape) for x in found])))
    (found, found_gradients), (expected, expected_gradients) = results
    assert len(found) == len(expected)
    for a, b in zip([*found, *found_gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def inputs(batch_first: bool = False, kdim: int = E, vdim: int = E) -> list[Tensor]:
    rows = [torch.randn(L, N, E), torch.randn(S, N, kdim), torch.randn(S, N, vdim)]
    return [x.transpose(0, 1).contiguous() if batch_first else x for x in rows]


def padding(kind: str) -> Tensor | None:
    hidden = torch.arange(S) >= torch.tensor([[S], [5], [1]])
    return {
        "none": None,
        "bool": hidden,
        "float": torch.where(hidden, -torch.inf, torch.randn(N, S)),
    }[kind]


def mask(kind: str) -> Tensor | None:
    hidden, each = torch.rand(L, S) < 0.3, torch.rand(N * H, L, S) < 0.3
    hidden[:, 0] = each[:, :, 0] = False
    return {
        "none": None,
        "bool": hidden,
        "float": torch.randn(L, S),
        "bool per head": each,
        "float per head": torch.randn(N * H, L, S),
    }[kind]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("same", [False, True], ids=["cross", "self"])
def test_outputs_and_gradients_are_torchs(
    batch_first: bool, need_weights: bool, training: bool, same: bool
) -> None:
    modules = [module.train(training) for module in pair(batch_first=batch_first)]
    compare(*modules, inputs(batch_first)[: 1 if same else 3], need_weights=need_weights)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("of_keys", ["none", "bool", "float"])
@pytest.mark.parametrize("of_pairs", ["none", "bool", "float", "bool per head", "float per head"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_masks_mean_what_torch_says(of_keys: str, of_pairs: str, need_weights: bool) -> None:
    masks = {"key_padding_mask": padding(of_keys), "attn_mask": mask(of_pairs)}
    compare(*pair(), inputs(), need_weights=need_weights, **masks)


LAYERS: dict[str, dict[str, Any]] = {
    "without bias": {"bias": False},
    "own key and value": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 20, "vdim": 28},
    "all": {"kdim": 20, "add_bias_kv": True, "add_zero_attn": True, "bias": True},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_kind_of_layer(name: str, masked: bool, batch_first: bool) -> None:
    options = LAYERS[name]
    masks = {"key_padding_mask": padding("bool"), "attn_mask": mask("bool")} if masked else {}
    rows = inputs(batch_first, options.get("kdim", E), options.get("vdim", E))
    ours, theirs = pair(batch_first=batch_first, **options)
    compare(ours, theirs, rows, **masks)
    compare(ours, theirs, rows, need_weights=False, **masks)


@pytest.mark.parametrize("of_pairs", ["none", "bool", "per head"])
@pytest.mark.parametrize("average", [False, True])
def test_input_without_a_batch(of_pairs: str, average: bool) -> None:
    rows = [x[:, 0] for x in inputs()]
    masks: dict[str, Any] = {"key_padding_mask": torch.arange(S) >= 9}
    if of_pairs != "none":
        masks["attn_mask"] = torch.zeros(*((H,) if of_pairs == "per head" else ()), L, S).bernoulli(0.2) > 0
        masks["attn_mask"][..., 0] = False
    compare(*pair(), rows, average_attn_weights=average, **masks)


def test_weights_for_each_head() -> None:
    compare(*pair(), inputs(), average_attn_weights=False, attn_mask=mask("float"))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("floating", [False, True])
def test_the_causal_hint(padded: bool, need_weights: bool, floating: bool) -> None:
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    options: dict[str, Any] = {"attn_mask": causal, "is_causal": True, "need_weights": need_weights}
    if floating:
        options["attn_mask"] = torch.zeros(L, L).masked_fill(causal, -torch.inf)
    if padded:
        options["key_padding_mask"] = torch.arange(L) >= torch.tensor([[L], [4], [1]])
    compare(*pair(), inputs()[:1], **options)


def test_a_causal_hint_does_not_hide_the_layers_own_keys() -> None:
    ours, _ = pair(add_bias_kv=True, add_zero_attn=True)
    (x, *_), causal = inputs(), torch.ones(L, L, dtype=torch.bool).triu(1)
    expected, _ = ours(x, x, x, attn_mask=causal)
    torch.testing.assert_close(ours(x, x, x, attn_mask=causal, is_causal=True)[0], expected)


def test_queries_that_see_nothing_have_no_weights_and_no_nan() -> None:
    ours, _ = pair()
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[4] = True
    rows = [x.requires_grad_() for x in inputs()]
    out, weights = ours(*rows, attn_mask=hidden)
    assert (weights[:, 4] == 0).all() and torch.allclose(weights[:, 5].sum(-1), torch.ones(N))
    torch.testing.assert_close(out[4], ours.out_proj.bias.expand(N, E))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum() + weights.sum(), rows))


def test_dropout_is_the_attentions_own() -> None:
    ours, _ = pair(dropout=0.5)
    rows = inputs()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(ours(*rows)[0])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    ours.eval()
    assert torch.equal(ours(*rows)[0], ours(*rows)[0])


def test_state_dicts_go_both_ways_and_copies_work() -> None:
    for options in LAYERS.values():
        ours, theirs = nn.MultiheadAttention(E, H, **options), torch.nn.MultiheadAttention(E, H, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        again = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))
        assert isinstance(ours, torch.nn.MultiheadAttention)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_half_precision_is_no_worse_than_torchs(dtype: torch.dtype) -> None:
    ours, theirs = pair()
    rows = inputs()
    exact = theirs.double()(*(x.double() for x in rows))
    lower = [x.to(dtype) for x in rows]
    for a, b, c in zip(ours.to(dtype)(*lower), theirs.to(dtype)(*lower), exact, strict=True):
        error, allowed = ((x.double() - c).square().mean().sqrt() for x in (a, b))
        assert a.dtype == dtype and error <= 2 * allowed + torch.finfo(dtype).eps * c.square().mean().sqrt()


def test_autocast_gives_its_type() -> None:
    ours, _ = pair()
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = ours(*inputs(), key_padding_mask=padding("float"))
    assert out.dtype == weights.dtype == torch.bfloat16


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_layer_compiles_in_one_piece(need_weights: bool) -> None:
    torch._dynamo.reset()
    ours, _ = pair(batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 14)):
        x = torch.randn(batch, length, E, requires_grad=True)
        hidden = torch.arange(length) >= torch.randint(1, length, (batch, 1))
        expected, _ = ours(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
        out, _ = compiled(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x), atol=1e-5, rtol=1e-5
        )


def test_torchs_encoder_layer_takes_ours() -> None:
    layer = torch.nn.TransformerEncoderLayer(E, H, dim_feedforward=64, dropout=0.0, batch_first=True)
    x = torch.randn(N, L, E)
    expected = layer(x)
    ours = nn.MultiheadAttention(E, H, batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), expected)


# nn.Attention


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "shared": {"num_kv_heads": 2, "is_causal": True},
    "head_dim": {"num_kv_heads": 3, "head_dim": 20, "bias": False},
    "options": {"window": (4, 1), "softcap": 5.0, "scale": 0.3, "alignment": "bottom_right"},
    "context": {"context_dim": 20, "sinks": True},
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_projections_around_attention(name: str, masked: bool) -> None:
    options = ATTENTION[name]
    layer = nn.Attention(E, H, **options)
    x = leaf(N, L, E)
    context = leaf(N, S, 20) if name == "context" else None
    length = S if context is not None else L
    hidden = torch.rand(N, 1, L, length) < 0.8 if masked else None
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)

    def plain() -> Tensor:
        source = x if context is None else context
        rows = [layer.q_proj(x), layer.k_proj(source), layer.v_proj(source)]
        q, k, v = (x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for x in rows)
        chosen = {
            n: options[n] for n in ("is_causal", "window", "softcap", "scale", "alignment") if n in options
        }
        out = tilewise.reference.attention(
            q, k, v, hidden, enable_gqa=True, sinks=layer.sinks, dtype=torch.float32, **chosen
        )
        return layer.out_proj(out.transpose(1, 2).flatten(2))

    leaves = [x, *layer.parameters(), *([] if context is None else [context])]
    out, expected = layer(x, context, hidden), plain()
    cotangent = [torch.randn_like(out)]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        gradients([out], leaves, cotangent), gradients([expected], leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def test_attention_drops_weights_in_training_alone() -> None:
    layer = nn.Attention(E, H, dropout=0.5)
    x = torch.randn(N, L, E)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_attention_in_half_precision_keeps_sinks_exact() -> None:
    layer = nn.Attention(E, H, sinks=True, is_causal=True).bfloat16()
    x = torch.randn(N, L, E, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    layer(x).sum().backward()
    assert layer.sinks.grad is not None


def test_attention_compiles_and_says_what_it_is() -> None:
    torch._dynamo.reset()
    layer = nn.Attention(E, H, num_kv_heads=2, is_causal=True, window=(3, 0))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(N, L, E)
    torch.testing.assert_close(compiled(x), layer(x))
    assert "num_kv_heads=2, head_dim=8, is_causal=True, window=(3, 0)" in repr(layer)


def test_attention_is_torchs_function_between_the_same_projections() -> None:
    layer = nn.Attention(E, H, is_causal=True)
    x = torch.randn(N, L, E)
    rows = [
        proj(x).unflatten(-1, (H, -1)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]
    expected = F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), layer.out_proj(expected), atol=1e-5, rtol=1e-5)


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(importlib.import_module("tilewise.nn.attention"))
    assert found.failed == 0 and found.attempted > 0
