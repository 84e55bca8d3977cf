"""Ranks as threads of one process, on one device: pieces, their joining and the order of messages.

On a GPU the CUDA kernels compute the pieces. There a process group of one rank by NCCL is tested, too.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import tilewise
import torch
import torch.distributed as dist
from conftest import assert_within_contract, gradients
from tilewise import distributed, reference
from tilewise._seeds import draw_seed
from tilewise.bench.exact import SixteenBitProducts
from tilewise.distributed.attention import _call
from tilewise.distributed.blocks import Blocks
from tilewise.distributed.checks import settings_of
from tilewise.distributed.function import Call
from tilewise.distributed.messages import Mailbox
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

RANKS = 4
SEED = 5


class Room:
    """Where threads leave each other messages."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)


class Arriving:
    """What `Pending` is of torch's messages."""

    def __init__(self, room: Room, rank: int, senders: list[int]) -> None:
        self.room, self.rank, self.senders = room, rank, senders

    def wait(self) -> dict[int, Tensor]:
        return {of: self.room.messages[of, self.rank].get(timeout=120) for of in self.senders}


class ThreadBox(Mailbox):
    """A thread's place among others. All use the device's one stream, so that messages need no events."""

    def __init__(self, room: Room, rank: int, size: int) -> None:
        super().__init__(None)
        self.room, self.rank, self.size = room, rank, size

    def post(
        self, sent: dict[int, Tensor], received: dict[int, int], dtype: torch.dtype, device: torch.device
    ) -> Any:
        for to, x in sent.items():
            if x.numel():
                assert x.dtype == dtype and x.device == device
                self.room.messages[self.rank, to].put(x)
        return Arriving(self.room, self.rank, [of for of, count in received.items() if count])


def boxes_of(method: str, rank: int, rooms: dict[tuple[str, int], Room]) -> tuple[Mailbox, ...]:
    """Of a mesh of all ranks, or for hybrid of two by two (ring, heads)."""
    if method != "hybrid":
        return (ThreadBox(rooms["all", 0], rank, RANKS),)
    ring, heads = divmod(rank, 2)
    return ThreadBox(rooms["ring", heads], ring, 2), ThreadBox(rooms["heads", ring], heads, 2)


def of_all_ranks(body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(body, range(RANKS)))


def whole_of(parts: list[Tensor], layout: distributed.Layout, dim: int = 2) -> Tensor:
    """Rows of all ranks in the order of the sequence."""
    rows = torch.cat(parts, dim)
    return torch.empty_like(rows).index_copy_(dim, layout.order.to(rows.device), rows)


def run_ranks(
    values: dict[str, Tensor],
    options: dict[str, Any],
    method: str,
    layout: distributed.Layout,
    ends: tuple[int, ...] | None = None,
    least_parts: int = 1,
) -> dict[str, Tensor]:
    """out, lse and all gradients, by threads that stand for ranks.

    They call what autograd would: its one thread for a device cannot wait for itself. With `ends` the
    sequence is a packed one.
    """
    rows = [values[name] for name in ("query", "key", "value")]
    mask, slopes = values.get("attn_mask"), values.get("alibi_slopes")
    of_heads = (values.get("sinks"), values.get("logit_scale"))
    defaults = dict(
        dropout_p=0.0, is_causal=False, scale=None, alignment="top_left", window=None, softcap=0.0
    )
    block_mask = options.get("block_mask")
    plain = {name: x for name, x in options.items() if name != "block_mask"}
    settings = settings_of(**{**defaults, **plain}, kernel="auto", deterministic=False, precision="standard")
    torch.manual_seed(SEED)
    words = draw_seed(rows[0].device).tolist()
    seed = (words[0], words[1]) if settings["dropout_p"] > 0 else None
    rooms: dict[tuple[str, int], Room] = {
        key: Room() for key in [("all", 0), *((n, m) for n in ("ring", "heads") for m in range(2))]
    }
    length = layout.length
    blocks = None if block_mask is None else Blocks.of(block_mask, length, length)
    own = [tuple(distributed.shard(x, layout, rank, 2) for x in rows) for rank in range(RANKS)]
    masks = [None if mask is None else distributed.shard(mask, layout, rank, 2) for rank in range(RANKS)]

    def call_of(rank: int) -> Call:
        boxes = boxes_of(method, rank, rooms)
        starts = (ends or (0, length),) * 2
        packed = ends is not None
        return _call(own[rank], boxes, method, (layout, layout), starts, settings, seed, packed, blocks)

    calls = [call_of(rank) for rank in range(RANKS)]
    assert min(len(call.parts) for call in calls) >= least_parts
    forward = of_all_ranks(lambda rank: calls[rank].forward(*own[rank], masks[rank], slopes, *of_heads))
    out = whole_of([x[0] for x in forward], layout)
    lse = whole_of([x[1] for x in forward], layout)
    cotangents = cotangents_of(out, lse)
    shared = [[distributed.shard(x, layout, rank, 2) for x in cotangents] for rank in range(RANKS)]
    heads = (rows[0].shape[1], rows[1].shape[1])

    def differentiate(rank: int) -> Any:
        return calls[rank].backward(forward[rank][2], masks[rank], heads, *shared[rank], mask is not None)

    found = of_all_ranks(differentiate)
    results = dict(out=out, lse=lse)
    for n, name in enumerate(("query", "key", "value", "attn_mask")):
        if name in values:
            results[name] = whole_of([x[n].to(values[name].dtype) for x in found], layout)
    for n, name in enumerate(("sinks", "logit_scale"), 4):
        if name in values:
            results[name] = torch.stack([x[n] for x in found]).sum(0)
    return results


def cotangents_of(out: Tensor, lse: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(x.shape, generator=generator).to(x.device, out.dtype).to(x.dtype) for x in (out, lse)]


def run_reference(
    values: dict[str, Tensor],
    options: dict[str, Any],
    dtype: torch.dtype,
    own: torch.dtype,
    ends: tuple[int, ...] | None = None,
) -> dict[str, Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in values.items()}
    torch.manual_seed(SEED)
    common = dict(options, enable_gqa=True, return_lse=True, dtype=dtype)
    if ends is None:
        out, lse = reference.attention(**leaves, **common)
    else:
        rows = [leaves[name][0].transpose(0, 1) for name in ("query", "key", "value")]
        more = {name: x for name, x in leaves.items() if name not in ("query", "key", "value")}
        lengths, longest = torch.tensor(ends), max(end - begin for begin, end in pairwise(ends))
        out, lse = reference.attention_varlen(*rows, lengths, lengths, longest, longest, **more, **common)
        out, lse = out.transpose(0, 1)[None], lse[None]
    cotangents = cotangents_of(out.to(own), lse.to(torch.float32))
    found = gradients((out, lse), list(leaves.values()), cotangents)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, found, strict=True))}


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "causal": (dict(is_causal=True), ()),
    "window": (dict(is_causal=True, window=(70, None)), ("sinks",)),
    "dropout": (dict(is_causal=True, dropout_p=0.2), ()),
    "alibi": (dict(is_causal=True, softcap=5.0), ("alibi_slopes",)),
    "mask": (dict(), ("attn_mask",)),
    "logit scale": (dict(is_causal=True), ("logit_scale",)),
    "blocks": (dict(), ()),  # see block_mask_of
}


def block_mask_of(heads: int, length: int, device: torch.device) -> tilewise.BlockMask:
    """A window that is wider from head to head, and documents."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < length * (h + 1) // heads) & (3 * q // length == 3 * k // length)

    block = length // 8
    return tilewise.BlockMask.from_mask_mod(
        mask_mod, length, length, heads=heads, block_size=block, device=device
    )


CASES = [
    *(("ring", layout, name) for layout in ("contiguous", "zigzag", "striped") for name in OPTIONS),
    *(("gather", "striped", name) for name in ("causal", "dropout", "logit scale")),
    *(("gather", "zigzag", name) for name in ("alibi", "mask")),
    *(("hybrid", "zigzag", name) for name in ("causal", "window", "dropout", "logit scale", "blocks")),
    *(("gather", layout, "blocks") for layout in ("contiguous", "striped")),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "layout", "name"), CASES)
def test_virtual_ranks_give_what_one_process_gives(
    device: torch.device, dtype: torch.dtype, method: str, layout: str, name: str
) -> None:
    compare_ranks(device, dtype, method, layout, name, heads=(4, 2))


# Ulysses alone is not among those above: of 4 heads each of 4 ranks has one, and that is attention itself.
IN_PARTS = [
    *(("ring", "zigzag", name) for name in OPTIONS),
    *(("gather", "striped", "causal"), ("gather", "zigzag", "mask")),
    *(("ulysses", "zigzag", name) for name in OPTIONS),
    *(("hybrid", "zigzag", name) for name in ("window", "dropout", "mask")),
    *((method, "documents", "causal") for method in ("ring", "gather", "ulysses", "hybrid")),
    *((method, "documents", name) for method in ("ring", "ulysses") for name in ("window", "alibi")),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("method", "layout", "name"), IN_PARTS)
def test_parts_of_the_heads_give_what_one_process_gives(
    device: torch.device,
    dtype: torch.dtype,
    method: str,
    layout: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sequence as long as those that are computed in parts would take a reference too long."""
    monkeypatch.setattr(distributed.heads, "LEAST_ROWS", {"cpu": 1, "cuda": 1})
    compare_ranks(device, dtype, method, layout, name, heads=(16, 8), least_parts=2)


def compare_ranks(
    device: torch.device,
    dtype: torch.dtype,
    method: str,
    layout: str,
    name: str,
    heads: tuple[int, int],
    least_parts: int = 1,
) -> None:
    """Virtual ranks with one process. The layout `documents` is of a packed sequence."""
    length, dim = (1024, 64) if device.type == "cuda" else (96, 16)
    of_keys = (1, heads[1], length, dim)
    shapes = {"query": (1, heads[0], length, dim), "key": of_keys, "value": of_keys}
    shapes |= {"attn_mask": (1, 1, length, length), "alibi_slopes": (heads[0],)}
    shapes |= {"sinks": (heads[0],), "logit_scale": (heads[0],)}
    ends = (0, length // 3, length // 3, length // 2, length) if layout == "documents" else None
    options, more = OPTIONS[name]
    if name == "blocks":
        options = dict(options, block_mask=block_mask_of(heads[0], length, device))
    values = {}
    for of in ("query", "key", "value", *more):
        statistic = of in ("alibi_slopes", "sinks", "logit_scale")
        x = torch.randn(shapes[of], device=device)
        values[of] = (x.abs() / 16 if of == "alibi_slopes" else x).to(torch.float32 if statistic else dtype)
    cut = getattr(distributed, layout)(length if ends is None else ends, RANKS)
    actual = run_ranks(values, options, method, cut, ends, least_parts)
    exact = run_reference(values, options, torch.float64, dtype, ends)
    rounds = device.type == "cuda" and dtype != torch.float32
    with SixteenBitProducts(dtype) if rounds else nullcontext():
        math = run_reference(values, options, torch.float32, dtype, ends)
    for result, x in actual.items():
        assert_within_contract(result, x, exact[result], math[result], dtype if result in more else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_only_key_is_a_rounding(device: torch.device, dtype: torch.dtype) -> None:
    """With causal and a window of 0 every query sees one key: P = 1, and dS = P (dP - delta + d_lse) = d_lse.

    In one process dP - delta is 0. Ranks have the two from different sums: they differ by a few roundings of
    |dO| |v| in f32, whatever the type of the rows, and so far dq and dk may be off.
    """
    length, dim = 96, 16
    scale, eps = dim**-0.5, torch.finfo(torch.float32).eps
    values = {
        name: torch.randn(1, 2, length, dim, device=device).to(dtype) for name in ("query", "key", "value")
    }
    options = dict(is_causal=True, window=(0, None))
    actual = run_ranks(values, options, "ring", distributed.zigzag(length, RANKS))
    query, key, value = (x.double() for x in values.values())
    d_out, d_lse = (x.double() for x in cotangents_of(actual["out"], actual["lse"]))
    assert torch.equal(actual["out"], values["value"])
    assert_close(actual["value"].double(), d_out, 4 * eps * d_out.abs())
    size = scale * (4 * eps * d_out.norm(dim=-1) * value.norm(dim=-1) + 4 * eps * d_lse.abs())[..., None]
    for name, other in (("query", key), ("key", query)):
        exact = scale * d_lse[..., None] * other
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert_close(actual[name].double(), exact, size * other.abs() + rounding)


def assert_close(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    error = (actual - exact).abs()
    assert (error <= bound).all(), f"{float((error / bound).max()):.3g} times the bound"


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # by itself NCCL does not take a machine without a network
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses", "hybrid"])
def test_a_world_of_one_with_nccl_is_attention(world_of_one: None, method: str, validate: bool) -> None:
    mesh = init_device_mesh("cuda", (1, 1) if method == "hybrid" else (1,))
    leaves = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    cotangent = torch.randn_like(leaves[0])

    def run(attend: Callable[..., Tensor], of: torch.dtype, **options: Any) -> list[Tensor]:
        own = [x.to(of, copy=True).requires_grad_() for x in leaves]
        out = attend(*own, is_causal=True, **options)
        return [out.detach(), *torch.autograd.grad(out, own, cotangent.to(out.dtype))]

    actual = run(distributed.attention, torch.bfloat16, mesh=mesh, method=method, validate=validate)
    exact = run(reference.attention, torch.float64, dtype=torch.float64)
    with SixteenBitProducts(torch.bfloat16):
        math = run(reference.attention, torch.float32, dtype=torch.float32)
    for name, *results in zip(("out", "dq", "dk", "dv"), actual, exact, math, strict=True):
        assert_within_contract(name, *results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_ring_in_f64_says_that_no_cuda_kernel_takes_it() -> None:
    values = {name: torch.randn(1, 2, 32, 8, device="cuda").double() for name in ("query", "key", "value")}
    with pytest.raises(tilewise.Unsupported, match="got f64"):
        run_ranks(values, dict(is_causal=True), "ring", distributed.zigzag(32, RANKS))
