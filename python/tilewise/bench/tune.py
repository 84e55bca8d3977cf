"""`tilewise tune`: which configuration of a kernel is the fastest on this GPU.

Kernels are compiled in several configurations, the rows of tuning tables. The library says which rows a call
could take, and takes those that it is told to (`include/tilewise/tuning.h`). Here they are timed.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewise import _binding, _errors
from tilewise.bench import kinds, timing
from tilewise.bench.implementations import call_of
from tilewise.bench.kinds import AnyProblem

# Another row must be so much faster than the default one: less is noise.
WORTH_IT = 0.99


@dataclass(frozen=True)
class Question:
    """Which of the rows that can run a problem?"""

    device: str
    table: str
    problem: str
    default: int
    rows: tuple[str, ...]

    @staticmethod
    def read(line: str) -> Question:
        """From the binding's text.

        >>> Question.read("a GPU\\ttable\\tf32 m=4\\t1\\tdim=64\\tdim=128").rows
        ('dim=64', 'dim=128')
        """
        device, table, problem, default, *rows = line.split("\t")
        return Question(device, table, problem, int(default), tuple(rows))

    def choice(self, row: int) -> dict[str, Any]:
        return {"device": self.device, "table": self.table, "problem": self.problem, "row": self.rows[row]}


@dataclass(frozen=True)
class Answer:
    question: Question
    times: tuple[timing.Timing, ...]  # of the rows

    @property
    def best(self) -> int:
        times = [one.ms for one in self.times]
        fastest = min(range(len(times)), key=times.__getitem__)
        default = self.question.default
        return fastest if times[fastest] < WORTH_IT * times[default] else default

    def choice(self) -> dict[str, Any]:
        """As the file has it."""
        micro = [float(f"{1e3 * one.ms:.4g}") for one in self.times]
        return self.question.choice(self.best) | {
            "microseconds": micro[self.best],
            "default_microseconds": micro[self.question.default],
        }


@dataclass(frozen=True)
class Status:
    """What plans go by."""

    path: str  # of the file, there or not; empty where TILEWISE_TUNING turns files off
    from_file: bool
    trouble: str  # why the file is ignored
    contents: dict[str, Any]  # as a file has them

    @property
    def choices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.contents["choices"]
        return found

    def text(self) -> str:
        """One line for `tilewise info`.

        >>> Status("/x.json", True, "", {"choices": [{"device": "a GPU"}]}).text()
        '/x.json, 1 choice measured on a GPU'
        >>> Status("", False, "", {"choices": []}).text()
        'off'
        """
        if self.trouble:
            return f"{self.path} is ignored: {self.trouble}"
        if self.choices:
            count = f"{len(self.choices)} choice{'s' if len(self.choices) > 1 else ''}"
            devices = dict.fromkeys(str(choice["device"]) for choice in self.choices)
            return f"{self.path or 'in memory'}, {count} measured on {'; '.join(devices)}"
        return f"none ({self.path} does not exist; `tilewise tune` creates it)" if self.path else "off"


def status() -> Status:
    """What is in use now."""
    path, source, trouble, contents = _binding.tuning_status()
    return Status(path, source == "file", trouble, json.loads(contents))


def use(contents: dict[str, Any] | None) -> None:
    """Lets plans of this process go by these contents of a file, or else by the file that is there."""
    try:
        _binding.use_tuning("" if contents is None else json.dumps(contents))
    except RuntimeError as error:
        raise _errors.translated(error, {}, {}) from None


def questions(call: Callable[[], object]) -> list[Question]:
    """What a call asks, where there is a choice."""
    _binding.tuning_begin()
    try:
        call()
    finally:
        lines = _binding.tuning_end()
    found = [Question.read(line) for line in lines]
    return [question for question in found if len(question.rows) > 1]


def merged(contents: dict[str, Any], fresh: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The contents with newer choices in place of those of the same question.

    >>> old = {"device": "a", "table": "t", "problem": "p", "row": "1"}
    >>> [x["row"] for x in merged({"choices": [old]}, [old | {"row": "2"}, old | {"device": "b"}])["choices"]]
    ['2', '1']
    """
    by_question = {
        (choice["device"], choice["table"], choice["problem"]): choice
        for choice in (*contents["choices"], *fresh)
    }
    return contents | {"choices": list(by_question.values())}


@contextlib.contextmanager
def _with(contents: dict[str, Any], choice: dict[str, Any]) -> Iterator[None]:
    use(merged(contents, [choice]))
    yield


def tune(problem: AnyProblem, device: torch.device, runs: int, seconds: float) -> list[Answer]:
    """Times the rows that a problem's chosen kernel could take; none where there is no choice."""
    was = status()
    before = was.contents
    name = kinds.chosen(problem, device)
    implementation = next((x for x in kinds.taking_part(problem.op, device) if x.name == name), None)
    if implementation is None:
        return []
    answers = []
    try:
        with implementation.around(problem):
            sets = [kinds.inputs(problem, device)]
            if device.type == "cuda":
                sets += [
                    kinds.inputs(problem, device) for _ in range(timing.sets_past_cache(sets[0].bytes) - 1)
                ]
            calls = [call_of(implementation, problem, one) for one in sets]
            for question in questions(calls[0]):
                entrants = {
                    str(row): timing.Entrant(calls, functools.partial(_with, before, question.choice(row)))
                    for row in range(len(question.rows))
                }
                times = timing.race(entrants, device, runs, seconds)
                answers.append(Answer(question, tuple(times[str(row)] for row in range(len(question.rows)))))
    finally:
        use(None if was.from_file else before)
    return answers
