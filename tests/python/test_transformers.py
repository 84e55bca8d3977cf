"""tilewise.integrations.transformers: tiny random models of Hugging Face against their own eager attention.

The bound is the contract's: at most twice the error of eager f32, errors being the distance to eager float64.
"""

from __future__ import annotations

import contextlib
import copy
import doctest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_within_contract
from contract import assert_twice, moved
from torch import Tensor
from torch.overrides import TorchFunctionMode

hf = pytest.importorskip("transformers")

from tilewise.integrations import transformers as integration  # noqa: E402

VOCABULARY, LENGTH, WINDOW = 64, 14, 5
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {"head_dim": 16}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**BERT, "image_size": 16, "patch_size": 4, "num_labels": 7},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**BERT, "vocab_size": VOCABULARY}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **{**LLAMA, **HEADS, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **{**LLAMA, **HEADS, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 2,
                "num_heads": 4,
            },
            **{
                "dropout_rate": 0.0,
                "relative_attention_num_buckets": 8,
                "relative_attention_max_distance": 16,
            },
            **{"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 12},
            **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_target_positions": 32},
            **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": 1},
            **{"suppress_tokens": None, "begin_suppress_tokens": None},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **{**LLAMA, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4},
            **{"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
            **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
            **{"v_head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
}
DECODERS = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]
ENCODER_DECODERS = ["t5", "whisper"]
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """On one thread: for models this small, waking others costs more than they do."""
    integration.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name: str, **changes: Any) -> Any:
    """The model with weights that make its attention far from uniform."""
    model_class, config_class, sizes = MODELS[name]
    config = getattr(hf, config_class)(**(sizes | changes))
    # The experts of mixtures as eager too: the default multiplies groups in one call, which float64 has not.
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(hf, model_class)._from_config(config, **how).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
    return model


def switched(model: Any, implementation: str = "tilewise") -> Any:
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    return model


def tokens(left_padded: bool, length: int = LENGTH) -> dict[str, Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, slice(None, 4) if left_padded else slice(-4, None)] = 0
    return {"input_ids": torch.randint(1, VOCABULARY, (2, length)) * mask, "attention_mask": mask}


def inputs_of(name: str) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": tokens(False)["input_ids"]}
    if name == "t5":
        return {**tokens(False), "decoder_input_ids": torch.randint(1, VOCABULARY, (2, 9))}
    return tokens(left_padded=name in DECODERS)


class InDouble(TorchFunctionMode):
    """Models turn to f32 for norms, rotations and softmax; here they stay in f64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double

        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        named = {name: widened(value) for name, value in (kwargs or {}).items()}
        return function(*(widened(value) for value in args), **named)


def logits_and_gradients(model: Any, inputs: dict[str, Tensor], double: bool = False) -> dict[str, Tensor]:
    """Of what is not padding; gradients by parameter."""
    model = copy.deepcopy(model)
    if double:
        model = model.double()
        inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    with InDouble() if double else contextlib.nullcontext():
        logits = model(**inputs).logits
        if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
            logits = logits[inputs["attention_mask"].bool()]
        torch.manual_seed(1)
        (logits * torch.randn(logits.shape).to(logits)).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def compare(model: Any, ours: Any, inputs: dict[str, Tensor]) -> None:
    def draw(n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        near = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in near.parameters() if n else ():
                parameter.copy_(moved(parameter, n))
        return logits_and_gradients(near, inputs, double=True), logits_and_gradients(near, inputs)

    assert_twice(logits_and_gradients(ours, inputs), draw)


@models
def test_logits_and_gradients_are_those_of_eager(name: str, device: torch.device) -> None:
    model = make(name).to(device)
    compare(model, switched(model), {n: x.to(device) for n, x in inputs_of(name).items()})


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_logits_in_bf16(name: str, device: torch.device) -> None:
    # All experts take part: in bf16 a token may change between two that are nearly as good.
    experts = {"num_experts_per_tok": 4} if name == "gpt_oss" else {}
    model = make(name, **experts).to(device, torch.bfloat16)
    inputs = {n: x.to(device) for n, x in inputs_of(name).items()}
    runs = (switched(model), False), (model, True), (model, False)
    logits = [logits_and_gradients(m, inputs, double=double)["logits"] for m, double in runs]
    assert_within_contract("logits", *logits)


@models
def test_every_layer_calls_tilewise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attention = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *x, **how: calls.append(how) or attention(*x, **how))
    model = switched(make(name))
    with torch.no_grad():
        model(**inputs_of(name))
    layers = 6 if name in ENCODER_DECODERS else 2  # self and cross-attention in each layer of a decoder
    assert len(calls) == layers


@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_without_padding(name: str) -> None:
    model = make(name)
    compare(model, switched(model), {"input_ids": torch.randint(1, VOCABULARY, (2, LENGTH))})


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_generate_gives_the_same_tokens(name: str, cache: str | None) -> None:
    model = make(name)
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    for inputs in (tokens(left_padded=True), {"input_ids": torch.randint(1, VOCABULARY, (2, LENGTH))}):
        assert torch.equal(switched(model).generate(**inputs, **how), model.generate(**inputs, **how))


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_t5_generates_the_same_tokens(cache: str | None) -> None:
    model, inputs = make("t5"), tokens(left_padded=False)
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(switched(model).generate(**inputs, **how), model.generate(**inputs, **how))


def test_whisper_generates_the_same_tokens() -> None:
    model = make("whisper")
    inputs = {
        "input_features": torch.randn(2, 8, 24),
        "decoder_input_ids": torch.ones(2, 1, dtype=torch.long),
    }
    how = {"max_new_tokens": 8, "do_sample": False}
    generate = hf.GenerationMixin.generate  # Whisper's own wants a tokeniser's ids in the configuration
    assert torch.equal(generate(switched(model), **inputs, **how), generate(model, **inputs, **how))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_prompt_in_chunks_gives_the_same_logits(name: str) -> None:
    model, ids = make(name), torch.randint(1, VOCABULARY, (1, LENGTH))
    with torch.no_grad():
        whole = switched(model)(ids).logits
        ours, cache = switched(model), hf.DynamicCache(config=model.config)
        parts = [
            ours(ids[:, s], past_key_values=cache).logits
            for s in (slice(0, 6), slice(6, 10), slice(10, None))
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_dropout_follows_torch_and_the_mode(name: str) -> None:
    p = {"bert": "attention_probs_dropout_prob", "llama": "attention_dropout", "t5": "dropout_rate"}[name]
    model, inputs = switched(make(name, **{p: 0.5})), inputs_of(name)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)
        model.train()
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(model(**inputs).logits)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_packed_sequences_do_not_see_each_other() -> None:
    model = switched(make("llama"))
    first, second = (torch.randint(1, VOCABULARY, (1, n)) for n in (6, 8))
    positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
    with torch.no_grad():
        packed = model(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed[:, 6:], model(second).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_compiles_without_a_graph_break(name: str) -> None:
    ours = switched(make(name))
    inputs = inputs_of(name) if name == "vit" else {"input_ids": torch.randint(1, VOCABULARY, (2, LENGTH))}
    expected = logits_and_gradients(ours, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    out = compiled(**inputs).logits
    torch.testing.assert_close(out, expected["logits"], atol=1e-5, rtol=1e-5)
    torch.manual_seed(1)
    (out * torch.randn(out.shape)).sum().backward()
    for parameter, gradient in ((n, g) for n, g in expected.items() if n != "logits"):
        torch.testing.assert_close(ours.get_parameter(parameter).grad, gradient, atol=2e-4, rtol=1e-4)


def test_exports_as_one_operator_a_layer() -> None:
    program = torch.export.export(switched(make("vit")), (), inputs_of("vit"))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("tilewise.") for target in targets) == 2


# The attention function by itself


class Layer(torch.nn.Module):
    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def dense(allowed: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> Tensor:
    """PyTorch's own attention over the pairs (i, j) that are allowed, as transformers wants it."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    mask = allowed(i, j).expand(q.shape[2], k.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


BANDS: dict[str, tuple[Layer, int, dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "causal by default": (Layer(), 9, {}, lambda i, j: j <= i),
    "as the module says": (Layer(False), 9, {}, lambda i, j: j >= 0),
    "the argument wins": (Layer(False), 9, {"is_causal": True}, lambda i, j: j <= i),
    "the argument wins too": (Layer(True), 9, {"is_causal": False}, lambda i, j: j >= 0),
    "top left": (Layer(True), 5, {}, lambda i, j: j <= i),
    "one query sees all": (Layer(True), 1, {}, lambda i, j: j >= 0),
    "window": (Layer(True), 9, {"sliding_window": 3}, lambda i, j: (j <= i) & (j > i - 3)),
    "window to both sides": (Layer(False), 9, {"sliding_window": 3}, lambda i, j: (i - j).abs() < 3),
    "window of one query": (Layer(True), 1, {"sliding_window": 3}, lambda i, j: j > 8 - 3),
}


@pytest.mark.parametrize(("layer", "queries", "given", "allowed"), BANDS.values(), ids=BANDS)
def test_what_is_seen_without_a_mask(layer: Layer, queries: int, given: dict[str, Any], allowed: Any) -> None:
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 9, 8)
    out, weights = integration.attention_forward(layer, q, k, k, None, **given)
    torch.testing.assert_close(out, dense(allowed, q, k))
    assert weights is None and out.is_contiguous()


def test_a_mask_holds_causality_and_window() -> None:
    q = torch.randn(1, 2, 9, 8)
    mask = torch.rand(1, 1, 9, 9) < 0.6
    out, _ = integration.attention_forward(Layer(True), q, q, q, mask, is_causal=True, sliding_window=2)
    torch.testing.assert_close(out, dense(lambda i, j: mask[0, 0], q, q))


@pytest.mark.parametrize("kind", ["none", "boolean", "floating"])
def test_position_bias_joins_a_mask_and_has_a_gradient(kind: str) -> None:
    q, bias = torch.randn(2, 4, 9, 8), torch.randn(1, 4, 9, 9, requires_grad=True)
    hidden = torch.rand(2, 1, 9, 9) < 0.4
    hidden[..., 0] = False
    floating = torch.zeros(2, 1, 9, 9).masked_fill(hidden, torch.finfo(torch.float32).min)
    mask = {"none": None, "boolean": ~hidden, "floating": floating}[kind]
    out, _ = integration.attention_forward(Layer(False), q, q, q, mask, position_bias=bias, scaling=1.0)
    added = bias + (0 if mask is None else floating)
    expected = torch.softmax(q @ q.transpose(2, 3) + added, dim=-1) @ q
    torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, bias, cotangent)[0] for x in (out.transpose(1, 2), expected)),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


REFUSED: dict[str, dict[str, Any]] = {
    "output_attentions": {"output_attentions": True},
    "cache": {"cache": object()},
    "indices": {"indices": torch.zeros(1, 4, 2).long()},
    "block_indices": {"block_indices": torch.zeros(1, 4, 2).long()},
    "head_mask": {"head_mask": torch.ones(2)},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 2, 4])},
}


@pytest.mark.parametrize(("argument", "given"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_done_raises(argument: str, given: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=argument):
        integration.attention_forward(Layer(), x, x, x, None, **given)
    unasked = dict.fromkeys(given)
    integration.attention_forward(
        Layer(), x, x, x, None, output_router_logits=True, use_cache=True, **unasked
    )


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_asking_a_model_for_its_weights_raises(name: str) -> None:
    with pytest.raises(NotImplementedError, match="output_attentions"):
        switched(make(name))(**inputs_of(name), output_attentions=True)


@pytest.fixture
def other_name() -> Iterator[str]:
    yield "attention_of_tiles"
    for interface in (hf.AttentionInterface, hf.AttentionMaskInterface):
        interface._global_mapping.pop("attention_of_tiles", None)


def test_registers_under_any_name_that_is_free(other_name: str) -> None:
    integration.register(other_name)
    model, inputs = make("llama"), inputs_of("llama")
    with torch.no_grad():
        logits = [switched(model, n)(**inputs).logits for n in ("tilewise", other_name)]
    assert torch.equal(*logits)
    for taken in ("sdpa", "my_flash", "eager", "paged|tilewise"):
        with pytest.raises(ValueError, match="name: expected"):
            integration.register(taken)


def test_examples() -> None:
    found = doctest.testmod(integration)
    assert found.failed == 0 and found.attempted > 0
