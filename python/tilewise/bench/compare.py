"""Two runs beside each other: which rows became faster or slower, and by how much more than they vary."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewise.bench.problem import BadInput
from tilewise.bench.records import Line, Record, identity
from tilewise.bench.summary import ours
from tilewise.bench.table import digits
from tilewise.bench.words import line_words, type_of

LEAST_CHANGE = 0.03  # what is less, one machine differs by from day to day
MOST_SHOWN = 12


@dataclass(frozen=True)
class Change:
    """A row that both runs have."""

    now: Line
    before: Line

    @property
    def times(self) -> float:
        """How many times as fast it is now."""
        return self.before["ms"] / self.now["ms"]

    @property
    def clear(self) -> bool:
        """Whether it is more than both rows vary by themselves."""
        noise = max(LEAST_CHANGE, *(line.get("spread") or 0.0 for line in (self.now, self.before)))
        return self.times > 1 + noise or self.times < 1 / (1 + noise)


@dataclass(frozen=True)
class Group:
    """Our rows of one suite, pass and type, and what the peers did there meanwhile."""

    name: tuple[str, str, str]
    changes: tuple[Change, ...]
    peers: tuple[Change, ...]

    @property
    def median(self) -> float:
        return statistics.median(change.times for change in self.changes)

    @property
    def of_peers(self) -> float | None:
        return statistics.median(change.times for change in self.peers) if self.peers else None

    @property
    def faster(self) -> int:
        return sum(change.clear and change.times > 1 for change in self.changes)

    @property
    def slower(self) -> int:
        return sum(change.clear and change.times < 1 for change in self.changes)


@dataclass
class Comparison:
    """A machine's rows now and in an earlier run."""

    environment: dict[str, object]  # of the earlier run
    changes: list[Change] = field(default_factory=list)

    @property
    def of_ours(self) -> list[Change]:
        return [change for change in self.changes if ours(change.now)]

    @property
    def of_peers(self) -> list[Change]:
        return [change for change in self.changes if not ours(change.now)]

    @property
    def groups(self) -> list[Group]:
        found: dict[tuple[str, str, str], tuple[list[Change], list[Change]]] = {}
        for change in self.changes:
            key = change.now["suite"], change.now["pass"], type_of(change.now)
            found.setdefault(key, ([], []))[not ours(change.now)].append(change)
        return [Group(key, tuple(us), tuple(peers)) for key, (us, peers) in found.items() if us]

    def times_of(self, line: Line) -> float | None:
        """How many times as fast a row is now; None where the earlier run does not have it."""
        return self._times.get(_key(line))

    @functools.cached_property
    def _times(self) -> dict[tuple[str, object], float]:
        return {_key(change.now): change.times for change in self.changes}

    def most(self, faster: bool) -> list[Change]:
        """Our rows that changed clearly in one direction, those that changed most first."""
        found = [x for x in self.of_ours if x.clear and (x.times > 1) == faster]
        return sorted(found, key=lambda x: x.times, reverse=faster)[:MOST_SHOWN]


def _key(line: Line) -> tuple[str, object]:
    return identity(line), line.get("threads")


def compare(now: Record, before: Record) -> Comparison:
    """The rows that both have figures for."""
    earlier = {_key(line): line for line in before.rows if line.get("ms")}
    both = [
        Change(line, earlier[_key(line)]) for line in now.rows if line.get("ms") and _key(line) in earlier
    ]
    return Comparison(before.environment, both)


def against(machines: Sequence[Record], earlier: Sequence[Record]) -> list[Comparison | None]:
    """One for each machine that the earlier run has, too. Raises BadInput where no row is in both."""
    then_by_name = {record.machine_and_device: record for record in earlier}
    found = [
        compare(record, then) if (then := then_by_name.get(record.machine_and_device)) else None
        for record in machines
    ]
    if not any(comparison and comparison.changes for comparison in found):
        now = ", ".join(record.machine for record in machines)
        before = ", ".join(record.machine for record in earlier)
        raise BadInput(f"--against: expected rows that both runs have, got none: {now} now, {before} before")
    return found


def sentences(comparison: Comparison) -> list[str]:
    """What changed, and how much of it the machine did by itself."""
    environment = comparison.environment
    then = str(environment.get("date", "an unknown day"))[:10]
    commit = f", commit {environment['commit']}" if environment.get("commit") else ""
    us, peers = comparison.of_ours, comparison.of_peers
    if not us:
        return [f"The run of {then}{commit} has no rows of our kernels."]
    faster = sum(change.clear and change.times > 1 for change in us)
    slower = sum(change.clear and change.times < 1 for change in us)
    median = statistics.median(change.times for change in us)
    said = [
        f"Compared with the run of {then}{commit}: of {len(us)} rows of our kernels in both, {faster} are "
        f"clearly faster and {slower} clearly slower; the median is {digits(median)} times as fast."
    ]
    if peers:
        theirs = statistics.median(change.times for change in peers)
        said.append(
            f"The peers' {len(peers)} rows are {digits(theirs)} times as fast in the median, "
            "which is what the machine and their versions changed."
        )
    if worst := comparison.most(faster=False):
        change = worst[0]
        said.append(
            f"Most slowed down: {change.now['impl']} at {line_words(change.now)}, "
            f"{digits(change.before['ms'])} ms before and {digits(change.now['ms'])} ms now."
        )
    return said
