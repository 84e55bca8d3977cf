"""Times the pieces of a ring on one GPU beside one whole call, and records it.

The ranks are virtual: one after another computes what it would in a causal ring in zigzag, and messages are
there at once. Times are sums over the ranks: of all they do (ring_ms); of it without the kernels of pieces,
which packs keys, joins outputs and sums gradients (merging_ms); and of all, if pieces rounded their outputs
to the type of the rows (ring_16_bit_ms), as they do not, because of the error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import gpu_record
from gpu_driver import find_gpu

sys.path.insert(0, str(gpu_record.STAGE / "python"))  # of a staged tree

import tilewise
import torch
from tilewise import distributed, reference
from tilewise.bench.timing import Entrant, race
from tilewise.distributed import pieces
from tilewise.distributed.attention import _call
from tilewise.distributed.checks import settings_of
from tilewise.distributed.messages import Mailbox
from tilewise.distributed.ring import pack
from torch import Tensor

DTYPE = torch.bfloat16
SIZES = (1, 2, 4, 8)  # of rings
SETTINGS = settings_of(0.0, True, None, "top_left", None, 0.0, "auto", False, "standard")
RUNS, CPU_SECONDS = 10, 0.1  # of each figure
JUDGED = 256  # rows at the end, of which errors are
Function = Callable[..., Any]


class Box(Mailbox):
    """A virtual rank's place. Keys of the others were packed before, part by part; gradients are zeros."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size
        self.keys: dict[int, Iterator[Tensor]] = {}
        self.zeros: dict[int, Tensor] = {}

    def post(self, sent: Any, received: dict[int, int], dtype: torch.dtype, device: torch.device) -> Any:
        def message(of: int, count: int) -> Tensor:
            if dtype == DTYPE:
                return next(self.keys[of])
            if count not in self.zeros:
                self.zeros[count] = torch.zeros(count, dtype=dtype, device=device)
            return self.zeros[count]

        found = {of: message(of, count) for of, count in received.items() if count}
        return argparse.Namespace(wait=lambda: found)


class Ranks:
    """All virtual ranks of a ring, with the rows of each."""

    def __init__(self, size: int, tensors: list[Tensor]) -> None:
        self.layout = distributed.zigzag(tensors[0].shape[2], size)
        self.rows = [[distributed.shard(x, self.layout, n, 2) for x in tensors] for n in range(size)]
        boxes = [Box(rank, size) for rank in range(size)]
        common = ("ring", (self.layout,) * 2, ((0, self.layout.length),) * 2, SETTINGS, None, False)
        self.calls: list[Any] = [
            _call((q, k, v), (box,), *common) for (q, k, v, _), box in zip(self.rows, boxes, strict=True)
        ]
        for box in boxes:
            for of in {*range(size)} - {box.rank}:
                call, (_, k, v, _) = self.calls[of], self.rows[of]
                parts = [call.problem.heads.places(part)[1] for part in call.parts]
                parcel = call.inner.plan.sent[box.rank]
                box.keys[of] = cycle([pack(parcel, k[:, heads], v[:, heads]) for heads in parts])

    def run(self, backward: bool) -> list[Tensor]:
        """The outputs of the ranks."""
        found = []
        for call, (q, k, v, cotangent) in zip(self.calls, self.rows, strict=True):
            out, _, saved = call.forward(q, k, v, None, None, None, None)
            found.append(out)
            if backward:
                call.backward(saved, None, (q.shape[1], k.shape[1]), cotangent, None, False)
        return found

    def out(self) -> Tensor:
        rows = torch.cat(self.run(backward=False), 2)
        return torch.empty_like(rows).index_copy_(2, self.layout.order.to(rows.device), rows)


@contextmanager
def replaced(**operators: Function) -> Iterator[None]:
    """Others in place of the operators that compute pieces."""
    before = {name: getattr(pieces, name) for name in operators}
    vars(pieces).update(operators)
    try:
        yield
    finally:
        vars(pieces).update(before)


def kept(operator: Function) -> Function:
    """Results of the first call with tensors of these shapes, for no time."""
    results: dict[Any, Any] = {}

    def call(*arguments: Any, **options: Any) -> Any:
        shapes = tuple(x.shape for x in arguments if isinstance(x, Tensor))
        if shapes not in results:
            results[shapes] = operator(*arguments, **options)
        return results[shapes]

    return call


def rounded(forward: Function, widened: bool = False) -> Function:
    """Of pieces whose outputs have the type of the rows."""

    def call(place: Any, wide: bool, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(place, False, *arguments, **options)
        return o.float() if widened else o, lse

    return call


def measure(tensors: list[Tensor], size: int) -> Iterator[dict[str, Any]]:
    """A line for forward, and one for forward and backward."""
    *rows, cotangent = tensors
    ranks, forward = Ranks(size, tensors), pieces._forward
    last = min(JUDGED, rows[0].shape[2])
    ends = {"is_causal": True, "alignment": "bottom_right", "dtype": torch.float64}
    exact = reference.attention(rows[0][:, :, -last:], *rows[1:], **ends)

    def error(out: Tensor) -> float:
        return float(f"{float((out[:, :, -last:] - exact).norm() / exact.norm()):.3g}")

    def whole(backward: bool) -> None:
        own = [x.detach().requires_grad_(backward) for x in rows]
        out = tilewise.attention(*own, is_causal=True)
        if backward:
            torch.autograd.grad(out, own, cotangent)

    errors = {
        "whole_error": error(tilewise.attention(*rows, is_causal=True)),
        "ring_error": error(ranks.out()),
    }
    with replaced(_forward=rounded(forward, widened=True)):
        errors["ring_16_bit_error"] = error(ranks.out())
    for backward in (False, True):
        ring = partial(ranks.run, backward)
        merging = partial(replaced, _forward=kept(forward), _backward=kept(pieces._backward))
        entrants = {
            "whole_ms": Entrant([partial(whole, backward)]),
            "ring_ms": Entrant([ring]),
            "merging_ms": Entrant([ring], merging),
            "ring_16_bit_ms": Entrant([ring], partial(replaced, _forward=rounded(forward))),
        }
        line: dict[str, Any] = {"pass": "forward and backward" if backward else "forward", "ranks": size}
        for name, entrant in entrants.items():  # alone: the GPU waits until the host has issued all
            line[name] = round(race({name: entrant}, rows[0].device, RUNS, CPU_SECONDS)[name].ms, 4)
        line["pieces_over_whole"] = round((line["ring_ms"] - line["merging_ms"]) / line["whole_ms"], 3)
        line["merging_share"] = round(line["merging_ms"] / line["ring_ms"], 3)
        yield line | ({} if backward else errors)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of records")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a small shape, to try it"
    )
    options = parser.parse_args(arguments)
    gpu_record.check_stage()
    gpu = find_gpu() if options.device == "cuda" else None
    record = gpu_record.Record(options.out / (gpu.slug if gpu else "no-gpu") / "context-parallel.jsonl", gpu)
    shape = dict(zip("bhsd", (1, 16, 16384, 128) if gpu else (1, 4, 64, 16), strict=True))
    torch.manual_seed(1)
    tensors = [torch.randn(tuple(shape.values()), device=options.device, dtype=DTYPE) for _ in range(4)]
    for size in SIZES:
        for line in measure(tensors, size):
            record.add({"suite": "context-parallel", **shape, "dtype": "bf16", "causal": True, **line})
            print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
    print(f"record in {record.path}")


if __name__ == "__main__":
    main()
