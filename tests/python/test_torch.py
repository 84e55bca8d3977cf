"""opcheck, autocast, recorded gradients, threads and processes: what PyTorch expects of its operators."""

from __future__ import annotations

import copy
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
from conftest import HQ, SK, SQ, leaf, lengths, rows
from tilewise import _binding, _ops, attention
from torch import Tensor


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
        "logit scale": (q, k, v, *_binding.DEFAULTS[3:-2], leaf(2)),
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
    scaled = len(arguments) == len(_binding.DEFAULTS) and isinstance(arguments[-1], Tensor)
    for needed in ([True] * 3 + [additive, sinks, scaled], [False, True, False, additive, False, scaled]):
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
    operator = _binding.attention_training if mask is None else _binding.attention_training_masked
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
    for operator in (_binding.attention_inference, _binding.attention_training):
        with pytest.raises(RuntimeError, match="options: expected f64 \\[5\\] on the CPU"):
            operator(q, k, v, wrong)


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


def test_a_pytorch_without_libtorch_so_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "libtorch.so: cannot open shared object file: No such file or directory"

    def fail(path: object) -> None:
        raise OSError(f"Could not load this library: {path}") from OSError(reason)

    monkeypatch.setattr(torch.ops, "load_library", fail)
    with pytest.raises(ImportError, match="install libtorch-dev"):
        _binding.load_library()
    reason = "file too short"
    with pytest.raises(OSError, match="Could not load this library"):
        _binding.load_library()
