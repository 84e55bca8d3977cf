"""tilewise.nn.TransformerLayer against Hugging Face's layers with the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tilewise
import torch
from conftest import assert_within_contract
from tilewise import nn
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import BertConfig, LlamaConfig, ViTConfig  # noqa: E402
from transformers.models.bert.modeling_bert import BertLayer  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)
from transformers.models.vit.modeling_vit import ViTLayer  # noqa: E402

E, F, H, S, B = 64, 112, 8, 37, 2


class Theirs:
    """A Hugging Face layer with random weights, in a type, called as its model would call it."""

    def __init__(self, kind: str, **options: Any) -> None:
        shape: dict[str, Any] = {"hidden_size": E, "intermediate_size": F, "num_attention_heads": H} | options
        self.kind = kind
        self.rotary: Any = None
        if kind == "llama":
            config = LlamaConfig(num_key_value_heads=2, attn_implementation="eager", **shape)
            self.layer: Any = LlamaDecoderLayer(config, 0)
            self.rotary = LlamaRotaryEmbedding(config)
        elif kind == "vit":
            self.layer = ViTLayer(ViTConfig(attn_implementation="eager", **shape))
        else:
            self.layer = BertLayer(BertConfig(attn_implementation="eager", **shape))
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                norm = "norm" in name.lower() and name.endswith("weight")
                parameter.normal_(mean=1.0 if norm else 0.0, std=0.1)
        self.layer.eval()

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Theirs:
        result = copy.copy(self)
        result.layer = copy.deepcopy(self.layer).to(device, dtype)
        result.rotary = None if self.rotary is None else copy.deepcopy(self.rotary).to(device)
        return result

    def __call__(self, x: Tensor) -> Tensor:
        if self.rotary is None:
            out = self.layer(x)
            return out[0] if isinstance(out, tuple) else out
        length = x.shape[1]
        lowest = torch.finfo(x.dtype).min
        mask = torch.full((length, length), lowest, dtype=x.dtype, device=x.device).triu(1)
        ids = torch.arange(length, device=x.device).unsqueeze(0)
        out = self.layer(
            x, attention_mask=mask[None, None], position_embeddings=self.rotary(x, ids), position_ids=ids
        )
        return out[0] if isinstance(out, tuple) else out


KINDS = ["llama", "vit", "bert"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_hugging_face(
    dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    theirs = Theirs(kind).to(dtype, device)
    ours = nn.TransformerLayer.from_hugging_face(theirs.layer)
    assert next(ours.parameters()).dtype == dtype
    x = torch.randn(B, S, E).to(device, dtype)
    cotangent = torch.randn(B, S, E).to(device, dtype)

    def run(layer: Any, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = layer(x)
        return [out, *torch.autograd.grad(out, [x, *weights], cotangent.to(x.dtype))]

    def theirs_of(layer: Any) -> list[Tensor]:
        from tilewise.nn.hugging_face import _PLACES, _part

        parts = [_part(layer, name) for name in _PLACES]
        return [part.weight for part in parts if part is not None]

    def ours_of(layer: nn.TransformerLayer) -> list[Tensor]:
        from tilewise.nn.hugging_face import _PLACES

        modules = dict(layer.named_modules())
        return [modules[name].weight for name in _PLACES if name in modules]

    wide = theirs.to(torch.float64, device)
    found = run(ours, x, ours_of(ours))
    exact = run(wide, x.double(), theirs_of(wide.layer))
    plain = run(theirs, x, theirs_of(theirs.layer))
    assert len(found) == len(exact) == len(plain)
    for index, (a, b, c) in enumerate(zip(found, exact, plain, strict=True)):
        assert_within_contract(f"{kind} result {index}", a, b, c)


def test_a_scaled_rotary_embedding_is_taken_over() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    theirs = Theirs("llama", rope_parameters=scaling)
    ours = nn.TransformerLayer.from_hugging_face(theirs.layer)
    x = torch.randn(B, S, E)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [None, 5])
def test_a_cache_gives_what_the_whole_gives(page_size: int | None, kind: str, device: torch.device) -> None:
    layer = nn.TransformerLayer.from_hugging_face(Theirs(kind).to(torch.float32, device).layer)
    x = torch.randn(B, 12, E, device=device)
    with torch.no_grad():
        if layer.config.is_causal:
            expected = layer(x)
            cache = layer.make_cache(B, 16, page_size)
            parts = [layer(part, cache=cache) for part in (x[:, :7], x[:, 7:8], x[:, 8:])]
            torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)
            assert cache.lengths.tolist() == [12, 12]
        else:  # every token sees all there are
            cache = layer.make_cache(B, 16, page_size)
            torch.testing.assert_close(layer(x, cache=cache), layer(x), atol=1e-5, rtol=1e-5)


def test_the_layer_compiles_whole() -> None:
    layer = nn.TransformerLayer.from_hugging_face(Theirs("llama").layer)
    x = torch.randn(B, 9, E)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    weight = layer.ffn.gate_proj.weight
    found = [torch.autograd.grad(f(x).square().sum(), weight)[0] for f in (compiled, layer)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        (
            "llama-2-7b",
            LlamaConfig,
            {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
        ),
        ("vit-b/16", ViTConfig, {}),
        ("bert-base", BertConfig, {}),
    ],
)
def test_configurations_are_those_of_the_models(name: str, kind: Any, options: dict[str, Any]) -> None:
    theirs, ours = kind(**options), nn.CONFIGS[name]
    assert (ours.embed_dim, ours.ffn_dim, ours.num_heads) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
    )
    if name != "llama-2-7b":
        assert ours.eps == theirs.layer_norm_eps


@pytest.mark.parametrize("name", nn.CONFIGS)
def test_layers_are_made_by_name(name: str) -> None:
    layer = nn.TransformerLayer(name, device="meta", dtype=torch.bfloat16)
    config = layer.config
    assert layer.attention.k_proj.weight.shape == (config.num_kv_heads * config.head_dim, config.embed_dim)
    assert layer.ffn.down_proj.weight.shape == (config.embed_dim, config.ffn_dim)


def test_tables_stay_in_f32() -> None:
    rotary = nn.RotaryEmbedding(8, 16).to(torch.bfloat16)
    cos, _ = tilewise.rope_tables(16, 8)
    assert torch.equal(rotary.cos, cos)


def test_a_layer_of_hugging_face_that_is_none_of_ours_is_named() -> None:
    odd = Theirs("llama").layer
    odd.self_attn.config.hidden_act = "relu6"
    with pytest.raises(tilewise.InvalidArgument, match=r"layer: expected an activation among .*, got relu6"):
        nn.TransformerLayer.from_hugging_face(odd)
    bare = type("LlamaDecoderLayer", (torch.nn.Module,), {})()
    with pytest.raises(tilewise.Unsupported, match="layer: none of its modules has a config"):
        nn.TransformerLayer.from_hugging_face(bare)
    layer = nn.TransformerLayer.from_hugging_face(Theirs("llama").layer)
    before = copy.deepcopy(layer.state_dict())
    lacking = Theirs("llama").layer
    del lacking.mlp.gate_proj
    with pytest.raises(
        tilewise.InvalidArgument, match=r"layer: expected a module for ffn\.gate_proj, got none"
    ):
        layer.load_hugging_face(lacking)
    ungated = copy.deepcopy(layer)
    del ungated.ffn.gate_proj
    with pytest.raises(tilewise.InvalidArgument, match=r"layer: expected no ffn\.gate_proj, got one"):
        ungated.load_hugging_face(Theirs("llama").layer)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)  # as if it had not been called


def test_a_printed_layer_says_its_sizes() -> None:
    text = repr(nn.TransformerLayer("llama-2-7b", embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8,
                                    ffn_dim=48))  # fmt: skip
    assert "RMSNorm(32, eps=1e-05, elementwise_affine=True)" in text
    assert "activation=silu" in text and "rotary_dim=8, max_positions=4096, base=10000" in text
    text = repr(nn.TransformerLayer("vit-b/16", embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8,
                                    ffn_dim=48))  # fmt: skip
    assert "LayerNorm(32, eps=" in text and "activation=gelu" in text


def test_mistakes_are_named() -> None:
    with pytest.raises(tilewise.InvalidArgument, match="config: expected one of vit-b/16"):
        nn.TransformerLayer("gpt-5")
    with pytest.raises(tilewise.InvalidArgument, match="layer: expected one of LlamaDecoderLayer"):
        nn.TransformerLayer.from_hugging_face(torch.nn.Linear(2, 2))
    layer = nn.TransformerLayer("vit-b/16", embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn_dim=48)
    with pytest.raises(tilewise.InvalidArgument, match=r"layer: attention\.q_proj\.weight: expected"):
        layer.load_hugging_face(Theirs("vit").layer)
    with pytest.raises(tilewise.InvalidArgument, match=r"x: expected \[B, S, 32\], got \[2, 32\]"):
        layer(torch.randn(2, 32))
    with pytest.raises(tilewise.InvalidArgument, match="attn_mask: expected none with a cache"):
        layer(
            torch.randn(1, 2, 32), attn_mask=torch.ones(2, 2, dtype=torch.bool), cache=layer.make_cache(1, 4)
        )
    cache = layer.make_cache(1, 4)
    with pytest.raises(tilewise.InvalidArgument, match="cache_ends: expected room for 5 tokens"):
        layer(torch.randn(1, 5, 32), cache=cache)
    assert cache.lengths.tolist() == [0]  # as if it had not been called
    with pytest.raises(tilewise.InvalidArgument, match="num_kv_heads: expected a divisor"):
        nn.LayerConfig(embed_dim=32, num_heads=4, num_kv_heads=3, ffn_dim=8)
