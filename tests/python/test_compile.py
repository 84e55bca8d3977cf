"""Compilation, export, traces and tensors without data: what PyTorch's compiler expects of operators."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import tilewise
import torch
from conftest import assert_close_with_gradients, lengths, rows
from tilewise import _ops, attention, attention_decode, attention_varlen, merge_states
from tilewise._arguments import tf32_allowed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

COMPILED = {
    "plain": {},
    "causal": {"is_causal": True},
    "options": {"window": (5, 0), "softcap": 4.0, "alignment": "bottom_right", "return_lse": True},
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
def test_compile_without_a_break_and_with_dynamic_shapes(name: str, backend: str) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = attention(q * 2, k, v, enable_gqa=True, **COMPILED[name])
        return out[0] + out[1].unsqueeze(-1) if isinstance(out, tuple) else out + 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for sizes in ({}, {"sq": 9, "sk": 70}, {"b": 3, "sq": 64, "sk": 64}):
        q, k, v = rows(**sizes)
        assert_close_with_gradients(compiled, attend, [q, k, v])
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def test_compile_of_the_other_forms() -> None:
    torch._dynamo.reset()
    block_mask = tilewise.BlockMask.from_dense(torch.rand(1, 1, 33, 33) < 0.4, block_size=16)

    @functools.partial(torch.compile, fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(x: Tensor, packed: Tensor, cu: Tensor, longest: int, used: Tensor) -> tuple[Tensor, ...]:
        return (
            attention(x, x, x, block_mask=block_mask),
            attention_varlen(packed, packed, packed, cu, cu, longest, longest, is_causal=True),
            attention_decode(x[:, :, -1:], x, x, used),
            tilewise.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0]),
            merge_states(*zip(*[attention(x, x, x, return_lse=True)] * 2, strict=True))[0],
        )

    x, packed = torch.randn(2, 3, 33, 16), torch.randn(20, 3, 16)
    out = compiled(x, packed, lengths(0, 8, 20), 12, lengths(5, 33))
    expected = (
        attention(x, x, x, block_mask=block_mask),
        attention_varlen(
            packed, packed, packed, lengths(0, 8, 20), lengths(0, 8, 20), 12, 12, is_causal=True
        ),
        attention_decode(x[:, :, -1:], x, x, lengths(5, 33)),
        attention(x[:1, :1], x[:1, :1], x[:1, :1])[0, 0],
        attention(x, x, x),
    )
    for ours, theirs in zip(out, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_explain_breaks_a_graph_and_says_so_where_it_must_not() -> None:
    x = torch.randn(1, 2, 16, 8)

    def attend(x: Tensor) -> tuple[Tensor, str]:
        return attention(x + 1, x, x), tilewise.explain(x, x, x)

    torch._dynamo.reset()
    out, text = torch.compile(attend, backend="aot_eager")(x)
    torch.testing.assert_close(out, attend(x)[0])
    assert text == tilewise.explain(x, x, x)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="explain gives text, which cannot be compiled"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(tilewise.Unsupported, match="meta or fake"):
        tilewise.explain(*[x.to("meta")] * 3)


def test_compiled_dropout_is_governed_by_manual_seed() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(attention, dropout_p=0.5), fullgraph=True)
    x = torch.randn(1, 2, 16, 8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(x, x, x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_export_with_dynamic_shapes(tmp_path: Any) -> None:
    block = Block().eval()
    shapes = {"x": {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2)}}
    program = torch.export.export(block, (torch.randn(2, 10, 32),), dynamic_shapes=shapes)
    assert any("tilewise.attention" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for size in ((2, 10, 32), (1, 33, 32)):
        x = torch.randn(size)
        torch.testing.assert_close(loaded(x), block(x))


def test_autocast_is_compiled_in() -> None:
    torch._dynamo.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(x, x, x)

    assert compiled(torch.randn(1, 2, 8, 8)).dtype == torch.bfloat16


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(2, 4, 8, 16, device="meta")
    out, lse = attention(x, x, x[..., :4], return_lse=True)
    assert out.shape == (2, 4, 8, 4) and lse.shape == (2, 4, 8) and attention(x, x, x).shape == x.shape


@pytest.mark.parametrize("needs_grad", [False, True])
def test_fake_tensors_without_a_compiler(needs_grad: bool) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 16, requires_grad=needs_grad)
        assert attention(q, q, q, is_causal=True).shape == q.shape
    q = torch.empty(2, 4, 8, 16, device="meta", requires_grad=needs_grad)
    assert attention(q, q, q, is_causal=True).shape == q.shape


def test_a_function_of_the_eager_path_is_traced() -> None:
    x = torch.randn(1, 2, 8, 4)
    traced = make_fx(lambda x: attention(x, x, x, is_causal=True))(x)
    y = torch.randn(1, 2, 8, 4)
    assert torch.equal(traced(y), attention(y, y, y, is_causal=True))


def test_backward_is_compiled_too() -> None:
    q, k, v = rows()
    expected = torch.autograd.grad(attention(q, k, v, is_causal=True, enable_gqa=True).sum(), [q, k, v])
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = torch.autograd.grad(attention(q, k, v, is_causal=True, enable_gqa=True).sum(), [q, k, v])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_importing_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import tilewise; print(*(set(sys.modules) - before))"
    )
    run = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "tilewise" in loaded and not {"sympy", "torch._dynamo"} & set(loaded)


def test_the_compiler_is_told_what_is_constant() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) == vars(tf32_allowed)


@pytest.mark.filterwarnings("ignore")
def test_a_jit_trace_holds_the_options() -> None:
    x, y = torch.randn(2, 1, 2, 6, 4)
    _ops.plain_calls.clear()
    traced = torch.jit.trace(lambda q: attention(q, q, q, is_causal=True), (x,))
    assert torch.equal(traced(y), attention(y, y, y, is_causal=True))
