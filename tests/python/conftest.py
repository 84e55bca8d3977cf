"""What the tests of the package share: seeds, devices, and the contract's bound on errors."""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tilewise.bench.exact import SixteenBitProducts
from torch import Tensor
from vit_example import folder, vit

__all__ = ["folder", "vit"]  # fixtures

# The sizes of a problem unless a test says otherwise; none is a multiple of a vector or tile.
B, HQ, HKV, SQ, SK, D, DV = 2, 6, 2, 37, 53, 40, 24


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs the same checks there")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of each test's own, so that it draws the same numbers alone and among others."""
    value = zlib.crc32(request.node.name.encode())
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session", autouse=True)
def torchvision_operators() -> Iterator[None]:
    """Declares torchvision's operators where its library does not load, as beside a torch without CUDA: timm
    and vit-pytorch import torchvision, but what is tested here does not call it."""
    library = None
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield
    del library


@pytest.fixture
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device can do at most is measured on little, for tests of the benchmark."""
    monkeypatch.setattr("tilewise.bench.rates._gemm_size", lambda device: 32)
    monkeypatch.setattr("tilewise.bench.rates.copy_gbps", lambda device: 10.0)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cpu", grad: bool = True) -> Tensor:
    """Normal numbers, exact in `dtype`."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def rows(
    dtype: torch.dtype = torch.float32, device: Any = "cpu", **sizes: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = {"b": B, "hq": HQ, "hkv": HKV, "sq": SQ, "sk": SK, "d": D, "dv": DV} | sizes
    return (
        leaf(n["b"], n["hq"], n["sq"], n["d"], dtype=dtype, device=device),
        leaf(n["b"], n["hkv"], n["sk"], n["d"], dtype=dtype, device=device),
        leaf(n["b"], n["hkv"], n["sk"], n["dv"], dtype=dtype, device=device),
    )


def lengths(*values: int, device: Any = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of all `inputs`, zeros for those the outputs do not depend on."""
    pairs = [(out, c.to(out.dtype)) for out, c in zip(outputs, cotangents, strict=True) if out.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in pairs], inputs, [c for _, c in pairs], allow_unused=True, materialize_grads=True
    )
    return list(found)


def assert_close_with_gradients(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    out, expected = ours(*inputs), theirs(*inputs)
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    found = (gradients([x], inputs, [cotangent]) for x in (out, expected))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def assert_within_contract(
    name: str, actual: Tensor, exact: Tensor, math: Tensor, precision: torch.dtype | None = None
) -> None:
    """At most twice the error of PyTorch's own arithmetic in the same precision, and one rounding more.

    Errors are root mean squares, as the largest of few is a matter of luck; no single one may stand out.
    `exact` is in float64; `math` was computed in f32 (or wider) and is rounded to `precision` here, the type
    of `actual` unless given.
    """
    precision = precision or actual.dtype
    exact, math = exact.double(), math.to(precision).double()
    assert actual.shape == exact.shape, f"{name}: shape {list(actual.shape)}, expected {list(exact.shape)}"
    infinite = exact.isinf()
    assert torch.equal(actual.double()[infinite], exact[infinite]), f"{name}: infinities differ"
    error, allowed = ((x.double() - exact)[~infinite].abs() for x in (actual, math))
    if error.numel() == 0:
        return
    rounding = torch.finfo(precision).eps * exact[~infinite].abs()
    for kind, of, slack in (("mean", lambda x: x.square().mean().sqrt(), 1), ("largest", torch.amax, 8)):
        bound = 2 * of(allowed) + slack * of(rounding)
        assert of(error) <= bound, f"{name}: {kind} error {of(error):.3g}, at most {bound:.3g} allowed"


Attend = Callable[..., tuple[Tensor, Tensor]]


def check_against(
    ours: Attend, reference: Attend, rows: Sequence[Tensor], extra: dict[str, Tensor], with_lse: bool = True
) -> None:
    """Outputs and all gradients of `ours` against `reference`, which takes `dtype` to compute in.

    `extra` are the differentiable tensors given by name, such as sinks.
    """
    seed = torch.randint(2**31, ()).item()

    def run(attend: Attend, cast: torch.dtype | None, **options: Any) -> list[Tensor]:
        torch.manual_seed(seed)  # the same dropout for all, and the same cotangents
        leaves = [x.detach().to(cast or x.dtype).requires_grad_() for x in (*rows, *extra.values())]
        out, lse = attend(
            *leaves[: len(rows)], **dict(zip(extra, leaves[len(rows) :], strict=True)), **options
        )
        torch.manual_seed(seed + 1)
        cotangents = [torch.randn(x.shape, device=x.device).to(rows[0].dtype) for x in (out, lse)]
        cotangents[1] = torch.where(lse.isinf(), 0.0, cotangents[1]).detach()
        count = 2 if with_lse else 1
        return [out, lse, *gradients((out, lse)[:count], leaves, cotangents[:count])]

    own = rows[0].dtype
    wide = torch.float32 if own != torch.float64 else torch.float64
    # GPUs compute f16 and bf16 with products of 16 bits.
    rounds = rows[0].is_cuda and own in (torch.float16, torch.bfloat16)
    with SixteenBitProducts(own) if rounds else nullcontext():
        math_results = run(reference, wide, dtype=wide)
    results = (run(ours, None), run(reference, torch.float64, dtype=torch.float64), math_results)
    names = ["out", "lse", *(f"gradient of {n}" for n in ("query", "key", "value")[: len(rows)]), *extra]
    for name, actual, exact, math in zip(names, *results, strict=True):
        # Of rows in 16 bits comes no gradient more precise than they are, be it of an f32 mask.
        precision = rows[0].dtype if name in extra else None
        assert_within_contract(name, actual, exact, math, precision)
