"""Compilation, export, autocast, vmap, threads and processes: what PyTorch expects of its operators."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tilewise
import torch
import torch.nn.functional as F
from conftest import HQ, SK, SQ, B, gradients, leaf, lengths, rows
from tilewise import _ops, attention, attention_decode, attention_varlen, merge_states
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def opcheck_samples() -> dict[str, tuple[Any, ...]]:
    q, k, v = rows(b=1, hq=2, hkv=2, sq=5, sk=6, d=8, dv=4)
    none = (None,) * 4
    seed = torch.tensor([3, 4])
    mask = tilewise.BlockMask.from_dense(torch.rand(1, 1, 5, 6) < 0.5, block_size=4)
    varlen = [leaf(9, 2, 8) for _ in range(3)]
    return {
        "plain": (q, k, v),
        "options": (q, k, v, None, 0.0, True, 0.5, True, None, True, 3, 1, 2.0, torch.rand(2), leaf(2)),
        "mask and dropout": (q, k, v, leaf(5, 6), 0.5, False, None, True, seed),
        "heads inside": tuple(x.detach().transpose(1, 2).requires_grad_() for x in (leaf(1, 5, 2, 8),) * 3),
        "lengths": (
            q, k, v, None, 0.0, False, None, True, None, False, None, None, 0.0, None, None, lengths(4),
        ),
        "packed": (
            *varlen, None, 0.0, True, None, True, None, False, None, None, 0.0, *none, lengths(0, 4, 9),
            lengths(0, 4, 9), 5, 5,
        ),
        "blocks": (
            q, k, v, None, 0.0, False, None, True, None, False, None, None, 0.0, *none, None, None, 0, 0,
            mask.counts, mask.indices, mask.full_counts, mask.full_indices, mask.tile_ids, mask.tiles, 4, 4,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", opcheck_samples())
def test_opcheck_of_forward(name: str) -> None:
    torch.library.opcheck(torch.ops.tilewise.attention_forward.default, opcheck_samples()[name])


@pytest.mark.parametrize("name", opcheck_samples())
def test_opcheck_of_backward(name: str) -> None:
    arguments = opcheck_samples()[name]
    with torch.no_grad():
        out, lse = torch.ops.tilewise.attention_forward.default(*arguments)
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    additive = len(arguments) > 3 and isinstance(arguments[3], Tensor)
    sinks = len(arguments) > 14 and isinstance(arguments[14], Tensor)
    for needed in ([True] * 3 + [additive, sinks], [False, True, False, additive, False]):
        sample = (torch.randn_like(out), torch.randn_like(lse), out, lse, needed, *arguments)
        torch.library.opcheck(torch.ops.tilewise.attention_backward.default, sample)


@pytest.mark.parametrize("mask", [None, torch.rand(5, 6) < 0.5])
def test_opcheck_of_inference(mask: Tensor | None) -> None:
    q, k, v = (x.detach() for x in rows(b=1, hq=2, hkv=2, sq=5, sk=6, d=8, dv=4))
    options, _ = _ops.plain_calls[True, None, False, False]
    if mask is None:
        torch.library.opcheck(torch.ops.tilewise.attention_inference.default, (q, k, v, options))
    else:
        torch.library.opcheck(torch.ops.tilewise.attention_inference.masked, (q, k, v, options, mask))


@pytest.mark.parametrize("mask", [None, torch.rand(5, 6) < 0.5, torch.randn(2, 1, 6)])
def test_opcheck_of_training(mask: Tensor | None) -> None:
    q, k, v = (x.detach() for x in rows(b=1, hq=2, hkv=2, sq=5, sk=6, d=8, dv=4))
    options, _ = _ops.plain_calls[True, 0.5, False, False]
    operator = _ops.attention_training if mask is None else _ops.attention_training_masked
    plain = (q, k, v, options) if mask is None else (q, k, v, options, mask)
    # What records the gradient is round the operators, so that they have none of their own.
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, plain, test_utils=checks)
    out, lse = operator(*plain)
    for needed in ([True] * 3, [False, True, False, mask is not None and mask.is_floating_point()]):
        sample = (torch.randn_like(out), None, out, lse, needed, q, k, v, options, mask, False)
        torch.library.opcheck(
            torch.ops.tilewise.attention_training_backward.default, sample, test_utils=checks
        )


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
        expected, out = attend(q, k, v), compiled(q, k, v)
        torch.testing.assert_close(out, expected)
        cotangent = torch.randn_like(out)
        for ours, theirs in zip(
            gradients([out], [q, k, v], [cotangent]),
            gradients([expected], [q, k, v], [cotangent]),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
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


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_computes_in_its_type(grad: bool) -> None:
    q, k, v = (x.requires_grad_(grad) for x in rows())
    mask = leaf(SQ, SK, grad=grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, mask, enable_gqa=True)
        plain = attention(q, k, v, enable_gqa=True)
        masked = attention(q, k, v, mask > 0, enable_gqa=True)
        wide = attention(q.double(), k.double(), v.double(), enable_gqa=True)
    assert out.dtype == plain.dtype == masked.dtype == torch.bfloat16 and wide.dtype == torch.float64
    expected = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), enable_gqa=True)
    assert torch.equal(plain, expected)
    if grad:
        out.sum().backward()
        assert q.grad is not None and q.grad.dtype == torch.float32 and mask.grad is not None
        (gradient,) = torch.autograd.grad(plain.float().pow(2).sum(), q)
        (same,) = torch.autograd.grad(expected.float().pow(2).sum(), q)
        assert torch.equal(gradient, same)


def test_autocast_is_compiled_in() -> None:
    torch._dynamo.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(x, x, x)

    assert compiled(torch.randn(1, 2, 8, 8)).dtype == torch.bfloat16


VMAPPED: dict[str, Any] = {
    "all rows": ((0, 0, 0), {}),
    "queries": ((1, None, None), {}),
    "keys and values": ((None, 2, 2), {"is_causal": True}),
    "softcap": ((0, 0, 0), {"softcap": 2.0, "window": (3, 3)}),
    "slopes": ((0, 0, 0), {"alibi_slopes": torch.rand(HQ)}),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_is_a_loop(name: str) -> None:
    dims, options = VMAPPED[name]
    n = 3
    base = [
        x.detach() if d is None else torch.randn(n, *x.shape).movedim(0, d)
        for x, d in zip(rows(), dims, strict=True)
    ]
    attend = functools.partial(attention, enable_gqa=True, return_lse=True, **options)
    out, lse = torch.vmap(attend, dims)(*base)
    at = [[x if d is None else x.select(d, i) for x, d in zip(base, dims, strict=True)] for i in range(n)]
    for ours, theirs in zip((out, lse), zip(*(attend(*x) for x in at), strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))

    def loss(*tensors: Tensor) -> Tensor:
        return attend(*tensors)[0].pow(2).sum()

    per_item = torch.vmap(torch.func.grad(loss, (0, 1, 2)), dims)(*base)
    expected = [torch.func.grad(loss, (0, 1, 2))(*x) for x in at]
    for ours, theirs in zip(per_item, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask_shape", [(SQ, SK), (1, 1, SQ, SK), (B, 1, 1, SK), (HQ, SQ, 1)], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_vmap_over_masks_and_sinks(mask_shape: tuple[int, ...], mapped: bool) -> None:
    n = 3
    q, k, v = (torch.randn(n, *x.shape) for x in rows())
    mask, sinks = torch.randn(n, *mask_shape), torch.randn(n, HQ)
    if not mapped:
        mask, sinks = mask[0], sinks[0]
    dims = (0, 0, 0, *((0, 0) if mapped else (None, None)))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        return attention(q, k, v, mask, enable_gqa=True, sinks=sinks)

    def loss(*tensors: Tensor) -> Tensor:
        return attend(*tensors).pow(2).sum()

    items = [(q[i], k[i], v[i], mask[i] if mapped else mask, sinks[i] if mapped else sinks) for i in range(n)]
    out = torch.vmap(attend, dims)(q, k, v, mask, sinks)
    torch.testing.assert_close(out, torch.stack([attend(*item) for item in items]))
    found = torch.vmap(torch.func.grad(loss, (0, 1, 2, 3, 4)), dims)(q, k, v, mask, sinks)
    expected = zip(*(torch.func.grad(loss, (0, 1, 2, 3, 4))(*item) for item in items), strict=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=1e-5)


def test_the_gradient_of_a_vmap() -> None:
    q, k, v = (torch.randn(3, *x.shape, requires_grad=True) for x in rows())
    attend = functools.partial(attention, enable_gqa=True)
    found = torch.autograd.grad(torch.vmap(attend)(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(
        torch.stack([attend(*x) for x in zip(q, k, v, strict=True)]).sum(), (q, k, v)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_vmapped_dropout_follows_its_randomness() -> None:
    x = torch.randn(1, 2, 8, 8).expand(3, 1, 2, 8, 8)

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, dropout_p=0.5)

    same = torch.vmap(attend, randomness="same")(x)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    different = torch.vmap(attend, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend)(x)


PLAIN_MASKS: dict[str, Any] = {
    "none": None,
    "boolean": torch.rand(SQ, SK) < 0.8,
    "bias": torch.randn(HQ, 1, SK),
}


@pytest.mark.parametrize("grad", ["all", "value", "mask"])
@pytest.mark.parametrize("name", PLAIN_MASKS)
def test_a_plain_call_has_the_gradients_of_a_general_one(name: str, grad: str) -> None:
    q, k, v = rows()
    mask = PLAIN_MASKS[name]
    inputs = [q, k, v] if grad == "all" else [v] if grad == "value" else []
    if grad != "value" and name == "bias":
        mask = mask.clone().requires_grad_()
        inputs.append(mask)
    if not inputs:
        pytest.skip("nothing to differentiate")
    for x in (q, k, v):
        x.requires_grad_(any(x is y for y in inputs))
    plain = attention(q, k, v, mask, is_causal=True, scale=0.3, enable_gqa=True)
    general, _ = attention(q, k, v, mask, is_causal=True, scale=0.3, enable_gqa=True, return_lse=True)
    assert torch.equal(plain, general) and plain.requires_grad
    cotangent = torch.randn_like(plain)
    for ours, theirs in zip(
        torch.autograd.grad(plain, inputs, cotangent),
        torch.autograd.grad(general, inputs, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", range(4))
def test_what_a_gradient_needs_must_not_be_overwritten(which: int) -> None:
    tensors = [*rows(), torch.randn(SQ, SK)]
    out = attention(*tensors, enable_gqa=True)
    with torch.no_grad():
        tensors[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensors_go_through_hooks_and_are_freed() -> None:
    q, k, v = rows()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out = attention(q, k, v, enable_gqa=True)
    assert len(packed) == 5  # the inputs, the output, lse
    out.sum().backward()
    assert q.grad is not None
    node = weakref.ref(attention(q, k, v, enable_gqa=True).grad_fn)
    assert node() is None  # no cycle that waits for the collector


def test_inference_mode_and_no_grad_give_the_same() -> None:
    q, k, v = rows()
    expected = attention(q, k, v, enable_gqa=True)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, enable_gqa=True), expected)
    with torch.inference_mode():
        out = attention(q, k, v, enable_gqa=True)
        assert torch.equal(out, expected) and out.is_inference()
        assert attention(q, k, v, enable_gqa=True, return_lse=True)[1].is_inference()


def test_parameters_and_subclasses_pass() -> None:
    class Marked(Tensor):
        pass

    x = torch.randn(1, 2, 4, 8)
    assert torch.equal(attention(torch.nn.Parameter(x), x, x), attention(x, x, x))
    marked = attention(x.as_subclass(Marked), x, x)
    assert isinstance(marked, Marked) and torch.equal(marked.as_subclass(Tensor), attention(x, x, x))


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(2, 4, 8, 16, device="meta")
    out, lse = attention(x, x, x[..., :4], return_lse=True)
    assert out.shape == (2, 4, 8, 4) and lse.shape == (2, 4, 8) and attention(x, x, x).shape == x.shape


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v = rows(sq=200, sk=200)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = attention(q, k, v, enable_gqa=True, is_causal=True)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_threads_may_call_at_once() -> None:
    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 4, 60 + seed, 32, generator=generator, requires_grad=True)
        out = attention(x, x, x, is_causal=True)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        return torch.allclose(
            out, F.scaled_dot_product_attention(x, x, x, is_causal=True), atol=1e-5
        ) and bool(gradient.isfinite().all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def _in_child(queue: Any) -> None:
    x = torch.ones(1, 8, 256, 16, requires_grad=True)
    out = attention(x, x, x)
    out.sum().backward()
    queue.put(out.sum().item())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_may_call(method: str) -> None:
    x = torch.randn(1, 8, 256, 16)
    attention(x, x, x)  # the parent has threads already, which a forked child does not
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=60) == 8 * 256 * 16
    finally:
        child.kill()
        child.join()


def test_functions_and_exceptions_survive_copies_and_pickling() -> None:
    assert pickle.loads(pickle.dumps(attention)) is attention and copy.deepcopy(attention) is attention
    for kind in (tilewise.InvalidArgument, tilewise.Unsupported, tilewise.DeviceError):
        again = pickle.loads(pickle.dumps(kind("text")))
        assert type(again) is kind and str(again) == "text"


@pytest.mark.parametrize(("arguments", "expected"), [(["info"], "kernels"), (["--version"], "tilewise 0")])
def test_the_package_is_a_command(arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "tilewise", *arguments]
    assert expected in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_plain_calls_with_many_scales_keep_few_of_them() -> None:
    q, k, v = rows()
    for n in range(2 * _ops.plain_calls.most):
        plain = attention(q, k, v, scale=0.01 * n, enable_gqa=True)
        assert torch.equal(plain, attention(q, k, v, scale=0.01 * n, enable_gqa=True, return_lse=True)[0])
        assert len(_ops.plain_calls) <= _ops.plain_calls.most
    torch.autograd.grad(attention(q, k, v, scale=0, enable_gqa=True).sum(), [q, k, v])


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(5), torch.zeros(10, dtype=torch.float64)[::2]])
def test_the_operators_of_plain_calls_check_their_options(wrong: Tensor) -> None:
    q, k, v = (x.detach() for x in rows())
    for operator in (_ops.attention_inference, _ops.attention_training):
        with pytest.raises(RuntimeError, match="options: expected f64 \\[5\\] on the CPU"):
            operator(q, k, v, wrong)


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
    ours = vars(sys.modules["tilewise.attention"])["_tf32_allowed"]
    assert vars(marked) == vars(ours)


def test_autocast_of_the_cpu_leaves_other_devices_alone() -> None:
    x = torch.empty(1, 2, 4, 8, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x, x, x).dtype == torch.float32  # its options are on the CPU
        assert attention(x, x, x, dropout_p=0.5).dtype == torch.float32  # so is its seed


def test_options_made_in_inference_mode_serve_training() -> None:
    q, k, v = rows()
    _ops.plain_calls.clear()
    with torch.inference_mode():
        attention(q, k, v, enable_gqa=True)
    attention(q, k, v, enable_gqa=True).sum().backward()
    assert q.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_jit_trace_holds_the_options() -> None:
    x, y = torch.randn(2, 1, 2, 6, 4)
    _ops.plain_calls.clear()
    traced = torch.jit.trace(lambda q: attention(q, q, q, is_causal=True), (x,))
    assert torch.equal(traced(y), attention(y, y, y, is_causal=True))
