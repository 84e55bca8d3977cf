"""`tilewise bench`: suites one after another, rows on the screen and in records as they come."""

from __future__ import annotations

import datetime
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from tilewise.bench import environment, kinds, measure, rates, table, timing
from tilewise.bench.files import check_writable
from tilewise.bench.implementations import Implementation, absent, missing
from tilewise.bench.kinds import AnyProblem
from tilewise.bench.operations.calls import COMPILED, COMPILED_GRAPH
from tilewise.bench.problem import BadInput
from tilewise.bench.records import Record, Writer
from tilewise.bench.suites import Suite

REPORT = "report.html"


@dataclass
class Plan:
    """What is to be run."""

    settings: measure.Settings
    suites: Sequence[Suite]
    kernels: Sequence[str]  # names, or parts of them; empty is all
    out: Path
    fresh: bool = False
    compiled: bool = False  # whether compiled PyTorch takes part in the operations around attention
    within: float | None = None  # seconds after which no other problem is begun
    report: bool = False  # whether a page is written beside the records
    command: str = ""  # that the records say they were made by
    own_limits: bool = False  # whether a suite's own limit_ms counts

    def settings_of(self, suite: Suite) -> measure.Settings:
        """The settings, on a GPU with the suite's own limit where it has one that counts."""
        if self.own_limits and suite.limit_ms and self.settings.device.type == "cuda":
            return replace(self.settings, limit_ms=suite.limit_ms)
        return self.settings

    def implementations(self, suite: Suite, op: str) -> list[Implementation]:
        """Who takes part in the suite's problems of one kind."""
        every = kinds.taking_part(op, self.settings.device)
        if self.kernels:
            return [x for x in every if any(part in x.name for part in self.kernels)]
        also = (*suite.also, COMPILED, COMPILED_GRAPH) if self.compiled else suite.also
        return [x for x in every if (not x.on_demand or x.name in also) and x.name not in suite.leave_out]


class Progress:
    """Where a run stands, on one line of a terminal; nothing elsewhere."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self.total, self.done = total, 0
        self.start = time.monotonic()
        self.stream = stream if stream.isatty() else None

    def show(self, problem: AnyProblem) -> None:
        if self.stream:
            text = f"[{self.done + 1}/{self.total}] {problem.suite}: {problem}  {self.left()}"
            self.stream.write(f"\r\x1b[2K{text[:110]}")
            self.stream.flush()

    def left(self) -> str:
        """By the mean of what is done.

        >>> Progress(4).left()
        ''
        """
        if self.done == 0:
            return ""
        seconds = self.seconds / self.done * (self.total - self.done)
        return f"about {seconds // 60:.0f}:{seconds % 60:02.0f} left"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def check(self, within: float | None) -> None:
        if within is not None and self.seconds > within:
            raise TimeIsUp

    def clear(self) -> None:
        if self.stream:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()

    def step(self) -> None:
        self.done += 1


class TimeIsUp(Exception):
    """The seconds of `Plan.within` have passed."""


def run(plan: Plan) -> tuple[list[Path], bool | None]:
    """Measures; returns the records' files, and whether it came to its end: None where time was up before."""
    device = plan.settings.device
    check_kernels(plan.kernels, [problem for suite in plan.suites for problem in suite.problems], device)
    here = environment.describe(device) | ({"command": plan.command} if plan.command else {})
    if device.type == "cuda":
        here["peers_absent"] = absent()
    machine = Record(environment=here)
    folder = plan.out / environment.slug(here)
    if plan.report:
        check_writable("--out", folder / REPORT)
    writers = [
        Writer(folder / f"{suite.name}.jsonl", here, environment.IDENTITY, plan.fresh)
        for suite in plan.suites
    ]
    files = [writer.path for writer in writers]
    print(table.machine(here))
    if here.get("peers_absent"):
        print(missing(device))
    try:
        with timing.precision(tf32=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's reasons against a backend, for each problem again
            _run_suites(plan, writers, machine)
    except (KeyboardInterrupt, TimeIsUp) as stopped:
        up = isinstance(stopped, TimeIsUp)
        why = "The time is up" if up else "Interrupted"
        print(f"\n{why}. What was measured is kept; run the same command again to continue.")
        return [path for path in files if path.exists()], None if up else False
    return files, True


def _run_suites(plan: Plan, writers: Sequence[Writer], machine: Record) -> None:
    progress = Progress(sum(len(suite.problems) for suite in plan.suites))
    dtypes = {problem.dtype for suite in plan.suites for problem in suite.problems}
    machine.rates = rates.measure(plan.settings.device, dtypes)
    print(table.rates(machine))
    for suite, writer in zip(plan.suites, writers, strict=True):
        progress.check(plan.within)  # before a record of earlier days is replaced
        with timing.precision(suite.tf32):
            _run_suite(suite, writer, plan, machine, progress)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for writer in writers:  # only now: a run that is interrupted in a later suite keeps the earlier ones
        writer.finish(now)


def _run_suite(suite: Suite, writer: Writer, plan: Plan, machine: Record, progress: Progress) -> None:
    print(f"\n{suite.name}: {suite.about}" if suite.about else f"\n{suite.name}")
    if writer.resumed:
        print(f"{writer.resumed} rows of an interrupted run are kept")
    for line in machine.highest():
        writer.add({"suite": suite.name, **line})
    printer, settings = table.Printer(), plan.settings_of(suite)
    for problem in suite.problems:
        taking_part = plan.implementations(suite, problem.op)
        missing = [x for x in taking_part if not writer.has(_key(problem, x, plan.settings.device))]
        if missing:
            progress.check(plan.within)
            progress.show(problem)
            lines = measure.measure(problem, missing, settings, machine)
            progress.clear()
            for line in lines:
                writer.add(line)
            printer.show(problem, lines)
            _make_room(plan.settings.device)
        progress.step()


def _make_room(device: torch.device) -> None:
    """Gives memory back where much is held, which takes longer than most problems do."""
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory
        if torch.cuda.memory_reserved() > most // 2:
            torch.cuda.empty_cache()


def _key(problem: AnyProblem, implementation: Implementation, device: torch.device) -> dict[str, Any]:
    return problem.line() | {"impl": implementation.name, "device": device.type}


def check_kernels(kernels: Sequence[str], problems: Sequence[AnyProblem], device: torch.device) -> None:
    ops = dict.fromkeys(problem.op for problem in problems) if kernels else ()
    names = list(dict.fromkeys(x.name for op in ops for x in kinds.taking_part(op, device)))
    for part in kernels:
        if not any(part in name for name in names):
            raise BadInput(
                f"--kernels: expected names, or parts of names, among {', '.join(names)}, got {part!r}"
            )
