"""The `tilewise` command."""

from __future__ import annotations

import argparse
import platform

import torch

import tilewise


def info() -> str:
    """What is installed and what it can run on: one line each.

    >>> info().splitlines()[0].startswith("tilewise")
    True
    """
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return "\n".join(
        (
            f"tilewise  {tilewise.__version__}",
            f"torch     {torch.__version__}",
            f"python    {platform.python_version()}",
            f"threads   {torch.get_num_threads()}",
            f"devices   {', '.join(['cpu', *devices])}",
            f"kernels   {', '.join(tilewise.kernels())}",
        )
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; `arguments` are those of the process unless given."""
    parser = argparse.ArgumentParser(prog="tilewise", description=tilewise.__doc__)
    parser.add_argument("--version", action="version", version=f"tilewise {tilewise.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show versions, devices and kernels")
    parser.parse_args(arguments)
    print(info())
    return 0
