"""The peak memory of a rank in attention's forward and backward, as the operating system counts it.

    torchrun --nproc-per-node 4 examples/context_parallel/memory.py --method ring

Linux and CPUs alone. What the process had before is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

try:
    from tilewise import distributed
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
import torch.distributed as dist


def resident(field: str) -> float:
    """VmRSS, what is in memory, or VmHWM, the most there was; in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--method", default="ring", choices=["ring", "gather", "ulysses"])
    parser.add_argument("--length", type=int, default=32768, help="tokens of the sequence")
    parser.add_argument("--window", type=int, help="keys to the left that a query sees; all by default")
    given = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=size)

    def step(length: int) -> None:
        layout = distributed.zigzag(length, size)
        rows = [torch.randn(1, 8, layout.lengths[rank], 64, requires_grad=True) for _ in range(3)]
        window = None if given.window is None else (given.window, None)
        out = distributed.attention(*rows, is_causal=True, window=window, layout=layout, method=given.method)
        out.sum().backward()

    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    step(64 * size)  # what is loaded and made once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    step(given.length)
    peak = torch.tensor(resident("VmHWM") - before)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(
            f"{given.method}, {given.length} tokens on {size} ranks: {peak:.0f} MB for the rank with the most"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
