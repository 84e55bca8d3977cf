"""tilewise.integrations.sdpa: what F.scaled_dot_product_attention means stays, who computes it changes."""

from __future__ import annotations

import doctest
import threading
from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import gradients, leaf
from tilewise.integrations import sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.two_tensor import TwoTensor

torchs_own = F.scaled_dot_product_attention  # as code has it that imported the name before

FUNCTION = "tilewise, in place of torch's function"
HOOK = "tilewise, by torch's hook for flash attention"


@pytest.fixture(autouse=True)
def left_as_it_was() -> Any:
    yield
    assert not sdpa.is_enabled() and F.scaled_dot_product_attention is torchs_own
    assert current_flash_attention_impl() is None and torch.backends.mha.get_fastpath_enabled()


def rows(*lead: int, dtype: torch.dtype = torch.float32, dv: int = 16) -> list[Tensor]:
    return [leaf(*lead, n, d, dtype=dtype) for n, d in ((9, 16), (13, 16), (13, dv))]


CALLS: dict[str, Any] = {
    "plain": (lambda: rows(2, 4), {}),
    "causal": (lambda: rows(2, 4), {"is_causal": True}),
    "scale": (lambda: rows(2, 4), {"scale": 0.3}),
    "Dv": (lambda: rows(2, 4, dv=5), {}),
    "three dimensions": (lambda: rows(4), {"is_causal": True}),
    "five dimensions": (lambda: rows(2, 3, 4), {}),
    "boolean mask": (lambda: rows(2, 4), {"attn_mask": torch.ones(9, 13, dtype=torch.bool).tril(2)}),
    "mask": (lambda: rows(2, 4), {"attn_mask": torch.linspace(-2, 2, 13)[None]}),
    "lower right": (lambda: rows(2, 4), {"attn_mask": causal_lower_right(9, 13)}),
    "shared heads": (lambda: [leaf(2, 4, 9, 16), leaf(2, 2, 9, 16), leaf(2, 2, 9, 16)], {"enable_gqa": True}),
}


def both_passes(call: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    out = call(*inputs, **options)
    torch.manual_seed(0)
    return [out, *gradients([out], inputs, [torch.randn(out.shape)])]


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_routed_and_mean_the_same(name: str) -> None:
    make, options = CALLS[name]
    inputs = make()
    expected = both_passes(torchs_own, inputs, **options)
    with sdpa.use():
        found = both_passes(F.scaled_dot_product_attention, inputs, **options)
    assert sdpa.calls() == {FUNCTION: 1}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_masks_with_a_gradient_are_routed() -> None:
    inputs, mask = rows(2, 4), leaf(4, 9, 13)
    with sdpa.use():
        out = F.scaled_dot_product_attention(*inputs, mask)
    assert sdpa.calls() == {FUNCTION: 1}
    expected = torchs_own(*inputs, mask)
    for a, b in zip(*(gradients([x], [mask], [torch.ones(x.shape)]) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_dropout_is_routed_and_repeatable() -> None:
    inputs = rows(2, 4)
    with sdpa.use():
        results = []
        for _ in range(2):
            torch.manual_seed(5)
            results.append(F.scaled_dot_product_attention(*inputs, dropout_p=0.5))
    assert torch.equal(*results) and sdpa.calls() == {FUNCTION: 2}
    torch.manual_seed(5)
    assert torch.equal(results[0], tilewise.attention(*inputs, dropout_p=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "shared heads"])
def test_a_name_imported_before_comes_by_the_hook(name: str, dtype: torch.dtype) -> None:
    make, options = CALLS[name]
    inputs = [x.detach().to(dtype).requires_grad_() for x in make()]
    mask = options.get("attn_mask")
    options = options | ({"attn_mask": mask.to(dtype)} if mask is not None else {})
    expected = both_passes(torchs_own, inputs, **options)
    with sdpa.use():
        found = both_passes(torchs_own, inputs, **options)
    assert sdpa.calls() == {HOOK: 1}
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    assert torch.equal(both_passes(torchs_own, inputs, **options)[0], expected[0])


def test_a_gradient_may_be_taken_by_the_other() -> None:
    inputs = rows(2, 4)
    expected = both_passes(torchs_own, inputs)[1:]
    with sdpa.use():
        out = torchs_own(*inputs)
    torch.manual_seed(0)
    cotangent = [torch.randn(out.shape)]
    found = [gradients([out], inputs, cotangent)]
    out = torchs_own(*inputs)
    with sdpa.use():
        found.append(gradients([out], inputs, cotangent))
    for gradient in found:
        for a, b in zip(gradient, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def nested() -> list[Tensor]:
    return [torch.nested.nested_tensor([torch.randn(4, n, 8) for n in (3, 5)])] * 3


def wrapped() -> list[Tensor]:
    """As data-parallel libraries have them: what is inside is not where the Tensor says."""
    return [TwoTensor(x, x.clone()) for x in (torch.randn(2, 4, 9, 16) for _ in range(3))]


REFUSED: dict[str, Any] = {
    "float64": (lambda: rows(2, 4, dtype=torch.float64), {}, "query: only the reference"),
    "nested": (nested, {}, "query: not a dense tensor"),
    "head dims": (lambda: rows(2, 4, dv=4097), {}, "query: a head dimension outside 1 to 4096"),
    "subclass": (wrapped, {}, "query: a subclass of Tensor"),
    "mask and causal": (
        lambda: rows(2, 4),
        {"attn_mask": torch.linspace(-2, 2, 13)[None], "is_causal": True},
        "attn_mask: given with is_causal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tilewise_does_not_take_is_torchs(name: str) -> None:
    make, options, reason = REFUSED[name]
    inputs = make()
    with sdpa.use():
        out = F.scaled_dot_product_attention(*inputs, **options)
    expected = torchs_own(*inputs, **options)
    if not out.is_nested:
        assert type(out) is type(expected)
        assert torch.equal(*(x.a if isinstance(x, TwoTensor) else x for x in (out, expected)))
    (route,) = sdpa.calls()
    assert route.startswith(f"torch: {reason}") and reason in sdpa.explain()


def test_a_choice_of_torchs_backend_is_respected() -> None:
    inputs = rows(2, 4)
    with sdpa.use(), sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*inputs)
        assert torch.equal(out, torchs_own(*inputs))
    assert sdpa.calls() == {"torch: sdpa_kernel: flash attention is switched off": 1}


MALFORMED: dict[str, Any] = {
    "head dims": (lambda: [leaf(2, 4, 9, 16), leaf(2, 4, 9, 8), leaf(2, 4, 9, 8)], {}),
    "integers": (lambda: [torch.ones(2, 4, 9, 16, dtype=torch.int32)] * 3, {}),
    "types": (lambda: [leaf(2, 4, 9, 16), *(leaf(2, 4, 9, 16, dtype=torch.float16) for _ in range(2))], {}),
    "a list": (lambda: [[1.0], *rows(2, 4)[1:]], {}),
    "mask shape": (lambda: rows(2, 4), {"attn_mask": torch.zeros(9, 12)}),
    "dropout": (lambda: rows(2, 4), {"dropout_p": 1.5}),
    "numbers": (lambda: [torch.tensor(1.0)] * 3, {}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_raises_what_torch_raises(name: str) -> None:
    make, options = MALFORMED[name]
    inputs = make()
    with pytest.raises(Exception) as expected:
        torchs_own(*inputs, **options)
    with sdpa.use(), pytest.raises(expected.type):
        F.scaled_dot_product_attention(*inputs, **options)
    assert not sdpa.is_enabled()


# Models


@pytest.mark.parametrize("training", [False, True])
def test_transformer_layers_are_reached(training: bool) -> None:
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    decoder = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    x, y = torch.randn(3, 10, 32), torch.randn(3, 6, 32)
    hidden = torch.arange(10) >= torch.tensor([[10], [4], [7]])
    causal = torch.nn.Transformer.generate_square_subsequent_mask(6)

    def run() -> Tensor:
        memory = encoder(x, src_key_padding_mask=hidden)
        return decoder(y, memory, tgt_mask=causal, tgt_is_causal=True)

    with torch.set_grad_enabled(training):
        expected = run()
        with sdpa.use():
            out = run()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert sdpa.calls() == {FUNCTION: 3}


def test_an_encoder_with_padding_is_reached_in_evaluation() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    x, hidden = torch.randn(2, 10, 32), torch.arange(10) >= torch.tensor([[10], [4]])
    with torch.inference_mode():
        expected = model(x, src_key_padding_mask=hidden)
        with sdpa.use():
            out = model(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(out[~hidden], expected[~hidden], atol=1e-5, rtol=1e-5)
    assert sdpa.calls() == {FUNCTION: 2}


def test_multihead_attention_is_reached_where_no_weights_are_asked() -> None:
    layer = torch.nn.MultiheadAttention(32, 4).eval()
    x = torch.randn(7, 2, 32)
    with sdpa.use():
        layer(x, x, x)
        assert sdpa.calls() == {}
        layer(x, x, x, need_weights=False)
    assert sdpa.calls() == {FUNCTION: 1}


# Switching


def test_enable_and_disable_are_each_done_once() -> None:
    sdpa.disable()
    for _ in range(2):
        sdpa.enable()
    assert sdpa.is_enabled() and current_flash_attention_impl() == "tilewise"
    for _ in range(2):
        sdpa.disable()
        assert F.scaled_dot_product_attention is torchs_own


def test_blocks_nest_and_survive_exceptions() -> None:
    with pytest.raises(ValueError, match="inside"), sdpa.use():
        with pytest.raises(KeyError), sdpa.use():
            raise KeyError
        assert sdpa.is_enabled()
        raise ValueError("inside")
    sdpa.enable()
    with sdpa.use():
        pass
    assert sdpa.is_enabled()
    with sdpa.use():
        sdpa.disable()
        assert sdpa.is_enabled()


def test_a_patch_made_meanwhile_is_left_alone() -> None:
    inputs = rows(2, 4)
    sdpa.enable()
    ours = F.scaled_dot_product_attention

    def theirs(*arguments: Any, **options: Any) -> Tensor:
        return ours(*arguments, **options)

    F.scaled_dot_product_attention = theirs
    try:
        sdpa.disable()
        assert F.scaled_dot_product_attention is theirs
        assert torch.equal(theirs(*inputs), torchs_own(*inputs)) and sdpa.calls() == {}
    finally:
        F.scaled_dot_product_attention = torchs_own


def test_a_fast_path_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa.use():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_another_implementation_of_the_hook_comes_back() -> None:
    removed = []

    class Handle:
        def remove(self) -> None:
            removed.append(True)

    torch.nn.attention.register_flash_attention_impl("another", register_fn=Handle)
    torch.nn.attention.activate_flash_attention_impl("another")
    with sdpa.use():
        assert current_flash_attention_impl() == "tilewise"
    assert current_flash_attention_impl() == "another"
    torch.nn.attention.restore_flash_attention_impl()
    assert len(removed) == 2


def test_threads_may_switch_and_call_at_once() -> None:
    inputs = [x.detach() for x in rows(2, 4)]
    expected, failures = torchs_own(*inputs), []

    def work() -> None:
        for _ in range(20):
            with sdpa.use():
                out = F.scaled_dot_product_attention(*inputs)
            if not torch.allclose(out, expected, atol=1e-5):
                failures.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Tracing


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_follows_the_switch(backend: str) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    inputs = rows(2, 4)
    expected = both_passes(attend, inputs)
    for expected_calls in ({FUNCTION: 1}, {}):  # traced once
        torch.testing.assert_close(both_passes(compiled, inputs), expected, atol=1e-4, rtol=1e-4)
        with sdpa.use():
            found = both_passes(compiled, inputs)
        assert sdpa.calls() == expected_calls
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_compiled_code_has_what_tilewise_does_not_take_from_torch() -> None:
    torch._dynamo.reset()
    inputs = rows(2, 4, dtype=torch.float64)
    compiled = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="aot_eager"
    )
    with sdpa.use():
        torch.testing.assert_close(compiled(*inputs), torchs_own(*inputs))
    assert "torch: query: only the reference kernel supports float64" in sdpa.calls()


def test_a_program_exported_before_comes_by_the_hook() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    inputs = tuple(x.detach() for x in rows(2, 4))
    before = torch.export.export(Model(), inputs).module()
    with sdpa.use():
        during = torch.export.export(Model(), inputs)
        assert "tilewise" in str(during.graph) and sdpa.calls() == {FUNCTION: 1}
        torch.testing.assert_close(before(*inputs), torchs_own(*inputs))
    torch.testing.assert_close(during.module()(*inputs), torchs_own(*inputs))


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(sdpa)
    assert found.failed == 0 and found.attempted > 0
