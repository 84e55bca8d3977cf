"""Reads ncu's counters for the kernels of `mma` and of FlashAttention-2, for docs/mma.md.

    python bench/mma_profile.py [--out results]

A program that runs under ncu makes one call of each. The record is <out>/<gpu>/mma-profile.jsonl, with one
line per kernel.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tilewise.bench import environment, kinds, profile
from tilewise.bench.problem import Problem
from tilewise.bench.records import Writer

PEER = "torch flash"
# The kernel of each call that computes its matrix products.
KERNELS = "regex:forward_kernel|backward_kernel|flash_fwd|flash_bwd_dq_dk_dv"


def problem(direction: str, dtype: str, b: int, h: int, s: int, d: int) -> Problem:
    return Problem(
        suite="mma-profile", direction=direction, dtype=dtype, b=b, hq=h, hkv=h, sq=s, sk=s, d=d, dv=d
    )


# 16k tokens of hidden size 2048, and f32 of 4 x 8 heads.
CALLS = [
    *(
        (problem(direction, "bf16", 4, 2048 // d, 4096, d), kernel)
        for d in (64, 128, 256)
        for direction in ("forward", "backward")
        for kernel in ("mma", PEER)
    ),
    *((problem("forward", "bf16", 32, 8, 512, 256), kernel) for kernel in ("mma", PEER)),
    *(
        (problem(direction, "f32", 4, 8, 1024, d), "mma")
        for d in (64, 128)
        for direction in ("forward", "backward")
    ),
]


def watched(device: torch.device) -> None:
    implementations = {one.name: one for one in kinds.taking_part("attention", device)}
    for asked, kernel in CALLS:
        profile.watched(implementations[kernel], asked, device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of records (results)")
    parser.add_argument("--watched", action="store_true", help="the calls alone, as ncu looks at them")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is here: torch.cuda.is_available() says no")
    device = environment.choose_device("cuda")
    if asked.watched:
        return watched(device)
    if not shutil.which("ncu"):
        raise SystemExit("ncu is not in PATH: it comes with CUDA's toolkit")
    found = profile.ncu_kernels([sys.executable, __file__, "--watched"], "--kernel-name", KERNELS)
    if len(found) != len(CALLS):
        names = "\n".join(name for name, _ in found)
        raise SystemExit(f"expected a kernel of each of {len(CALLS)} calls, got {len(found)}:\n{names}")
    about = environment.describe(device)
    path = asked.out / environment.slug(about) / "mma-profile.jsonl"
    record = Writer(path, about, environment.IDENTITY, fresh=True)
    for (of, kernel), (name, figures) in zip(CALLS, found, strict=True):
        sizes = {key: value for key, value in asdict(of).items() if key in ("dtype", "b", "hq", "sq", "d")}
        record.add(
            {"suite": of.suite, "op": "profile", "direction": of.direction, **sizes, "impl": kernel}
            | {"kernel": name, "figures": figures}
        )
    record.finish(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    print(f"{len(found)} kernels in {path}")


if __name__ == "__main__":
    main()
