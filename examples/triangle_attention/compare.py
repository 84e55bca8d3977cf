"""Triangle attention by Tilewise beside plain PyTorch: results, gradients, time and memory of scores.

python examples/triangle_attention/compare.py [--length 256] [--dtype float32] [--device cuda]

Sizes are AlphaFold 3's: 128 channels, 4 heads of 32. Some pairs do not exist, as in a crop with padding.
"""

from __future__ import annotations

import argparse
import copy
import time

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
from module import TriangleAttention, switch
from torch import Tensor, nn


def pairs(length: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A pair representation [1, length, length, dim], and which pairs exist."""
    exists = torch.rand(length, device=device) < 0.9
    exists[0] = True
    mask = (exists[:, None] & exists)[None].to(dtype)
    return torch.randn(1, length, length, dim, device=device).to(dtype), mask


def run(model: nn.Module, x: Tensor, mask: Tensor) -> tuple[list[Tensor], float]:
    """Output and gradients where pairs exist, and the time of both passes in milliseconds."""
    x = x.detach().requires_grad_()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x) * mask[..., None]
    for _ in range(2):  # the first is to warm up
        if x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(x, mask)
        found = torch.autograd.grad(out, [x, *model.parameters()], cotangent)
        if x.is_cuda:
            torch.cuda.synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
    return [out.detach() * mask[..., None], *found], elapsed


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    """The largest of the root mean square errors, relative to what is exact."""
    return max(
        float((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt())
        for x, y in zip(results, exact, strict=True)
    )


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=48, help="tokens; there are as many rows")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    blocks = [TriangleAttention(128, 32, 4, starting) for starting in (True, False)]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x, mask)
            return x

    plain = Pair().to(device, dtype)
    ours = copy.deepcopy(plain)
    print(f"{switch(ours)} modules switched to triangle_attention of tilewise {tilewise.__version__}")
    x, mask = pairs(options.length, 128, dtype, device)
    exact, _ = run(copy.deepcopy(plain).double(), x.double(), mask.double())
    errors = {}
    for name, model in (("plain PyTorch", plain), ("tilewise", ours)):
        results, elapsed = run(model, x, mask)
        errors[name] = error(results, exact)
        print(f"{name:14} {elapsed:9.1f} ms, error {errors[name]:.2g}")
    scores = options.length**3 * 4 * x.element_size() / 2**20
    print(f"scores that plain PyTorch keeps for each module: {scores:.0f} MiB; tilewise: none")
    return errors


if __name__ == "__main__":
    main()
