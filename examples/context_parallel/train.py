"""Trains a small GPT on a sequence that several processes hold together.

    python examples/context_parallel/train.py                                  # one process
    torchrun --nproc-per-node 4 examples/context_parallel/train.py             # four, on CPUs (gloo)
    torchrun --nproc-per-node 8 examples/context_parallel/train.py --device cuda  # NCCL; not tried yet

Every process has its part of each sequence alone; the losses are those of one process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

try:
    from tilewise import distributed
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CORPUS = Path(__file__).parents[1] / "minilm" / "corpus.txt"


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mesh: DeviceMesh, layout: distributed.Layout, method: str) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(2)
        # The only line in which ranks meet: everything else of a layer looks at one token.
        out = distributed.attention(
            query, key, value, is_causal=True, mesh=mesh, layout=layout, method=method
        )
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class GPT(nn.Module):
    def __init__(self, tokens: int, length: int, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, tokens)

    def forward(
        self, tokens: Tensor, positions: Tensor, mesh: DeviceMesh, layout: distributed.Layout, method: str
    ) -> Tensor:
        """Logits of this rank's tokens, which stand at `positions` of the sequence."""
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mesh, layout, method)
        return self.head(self.norm(x))


def train(mesh: DeviceMesh, steps: int, length: int, batch: int, method: str) -> list[float]:
    """The loss of every step."""
    rank, group, device = mesh.get_local_rank(), mesh.get_group(), mesh.device_type
    layout = distributed.zigzag(length, mesh.size())
    positions = layout.positions(rank).to(device)
    text = torch.tensor(list(CORPUS.read_bytes()))
    torch.manual_seed(0)  # the same weights and the same sequences on all ranks
    model = GPT(256, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch,))
        whole = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        tokens, targets = (
            distributed.shard(x, layout, rank, dim=1).to(device) for x in (whole[:, :-1], whole[:, 1:])
        )
        logits = model(tokens, positions, mesh, layout, method)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
        share = targets.numel() / (batch * length)  # of the sequence's tokens
        optimizer.zero_grad()
        (loss * share).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = (loss * share).detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
        if rank == 0 and len(losses) % 10 == 1:
            print(f"step {len(losses):4d}  loss {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=51)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, over all processes")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--method", default="ring", choices=["ring", "gather", "ulysses"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo", rank=rank, world_size=size)
    train(init_device_mesh(given.device, (size,)), given.steps, given.length, given.batch, given.method)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
