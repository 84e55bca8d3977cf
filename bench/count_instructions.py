"""Counts the CPU instructions of attention in Tilewise and torch, with valgrind's callgrind.

Counts do not depend on the load of the machine. valgrind supports no vectors above AVX2, so both libraries
run at that level, on one thread. An instruction has at most 16 FLOPs: a multiply-add of eight lanes. FLOPs
are 4·H·S·S·D forward, half when causal, and 2.5 times that backward.

In a checkout, after make build, with PYTHONPATH=python and
TILEWISE_TORCH_LIBRARY=build/release/bindings/torch/_tilewise.so in the environment of .venv/bin/python;
needs valgrind and takes some minutes.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS, LENGTH, DIM = 2, 512, 64
FLOPS_AN_INSTRUCTION = 16  # AVX2: eight lanes, multiply and add


def valgrind(arguments: list[str]) -> int:
    """Runs this script again under callgrind."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "COUNTS": f"{folder}/counts"}
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        command += [f"--callgrind-out-file={folder}/counts", sys.executable, __file__, *arguments]
        return subprocess.run(command, env=environment).returncode


def control(option: str) -> None:
    """Sends a command to the callgrind that runs this process."""
    subprocess.run(("callgrind_control", option, str(os.getpid())), check=True, capture_output=True)


def count(call: Callable[[], object]) -> int:
    """The number of instructions of a call, after one call that is not counted."""
    call()
    folder = Path(os.environ["COUNTS"]).parent
    before = set(folder.iterdir())
    control("--zero")
    call()
    control("--dump")
    (dump,) = set(folder.iterdir()) - before
    found = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
    assert found is not None, dump
    return int(found[1])


def measure(kind: str, variant: str) -> None:
    """Prints two rows: Tilewise and torch, forward and backward."""
    import tilewise
    import torch
    import torch.nn.functional as F

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
    options: dict[str, Any] = {}
    if variant == "causal":
        options["is_causal"] = True
    elif variant == "padding":  # hides nothing, to measure the cost of having a mask
        options["attn_mask"] = torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)
    elif variant == "bias":
        options["attn_mask"] = torch.randn(1, HEADS, LENGTH, LENGTH).to(dtype)
    leaves = [torch.randn(1, HEADS, LENGTH, DIM).to(dtype).requires_grad_() for _ in range(3)]
    gradient = torch.randn(1, HEADS, LENGTH, DIM).to(dtype)
    flops = 4 * HEADS * LENGTH * LENGTH * DIM * (0.5 if variant == "causal" else 1.0)
    for name, attend in (("Tilewise", tilewise.attention), ("SDPA", F.scaled_dot_product_attention)):
        out = attend(*leaves, **options)
        with torch.no_grad():
            forward = count(functools.partial(attend, *leaves, **options))
        backward = count(functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True))
        row = f"{kind:<6}{variant:<9}{name:<9}"
        for instructions, work in ((forward, flops), (backward, 2.5 * flops)):
            row += f"{instructions / 1e6:10.1f} M ({instructions * FLOPS_AN_INSTRUCTION / work:.2f})"
        print(row, flush=True)


def main(kinds: list[str]) -> None:
    import tilewise  # noqa: F401, loaded before counting starts
    import torch

    torch.set_num_threads(1)
    control("--instr=on")  # only now, since loading torch under callgrind would take minutes
    print(f"{HEADS} heads of {LENGTH} x {DIM}, forward and backward: instructions, and that over the least")
    for kind in kinds:
        for variant in ("full", "causal", "padding", "bias"):
            measure(kind, variant)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    given = parser.parse_args()
    if "COUNTS" in os.environ:
        main(given.types)
    else:
        sys.exit(valgrind(sys.argv[1:]))
