"""Worker processes with a process group of gloo. They start once, as importing torch takes seconds, and then
run one function after another."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)


def _serve(rank: int, size: int, store: str, orders: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=PATIENCE
    )
    while (order := orders.recv()) is not None:
        function, arguments = order
        try:
            orders.send((True, function(*arguments)))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            orders.send((False, f"rank {rank}: {text}"))
    dist.destroy_process_group()


class Ranks:
    """`size` processes, each with a rank."""

    def __init__(self, size: int, store: str) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self._orders = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function gives on every rank. It must be one that can be imported."""
        for orders in self._orders:
            orders.send((function, arguments))
        answers = [orders.recv() for orders in self._orders]
        failures = [text for good, text in answers if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        for orders in self._orders:
            with contextlib.suppress(OSError):
                orders.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
