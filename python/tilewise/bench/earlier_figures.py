"""What docs/capabilities.md shows beside the figures of earlier efforts, each of which had another card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tilewise.bench.records import Line, Record, about, read
from tilewise.bench.summary import Race, races

NOTHING = "Nothing has been recorded yet."
Chosen = Callable[[Line], bool]


def section(folder: Path) -> str:
    """One row for each earlier figure of which there is a record."""
    records = {
        name: read(path)
        for name in ("common-shapes", "ffn", "layer", "llama")
        if (path := folder / f"{name}.jsonl").exists()
    }
    rows = [row for row in _rows(records) if row[2]]
    if not rows:
        return NOTHING
    head = (
        f"{about(list(records.values()))}, f32 without TF32, forward; "
        "ranges are over the problems of the record:"
    )
    table = ["| what | earlier | ours | problems |", "| --- | ---: | ---: | --- |"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "", *table])


def _rows(records: dict[str, Record]) -> list[tuple[str, str, str, str]]:
    def chosen(name: str, wanted: Chosen) -> list[Race]:
        rows = records[name].rows if name in records else []
        return [
            race
            for race in races(rows)
            if race.first["dtype"] == "f32" and race.first["pass"] == "forward" and wanted(race.first)
        ]

    llama = chosen("llama", lambda line: True)
    networks = chosen("ffn", lambda line: True)
    layers = chosen("layer", lambda line: "llama" in str(line.get("sizes")) and line["op"] == "layer")
    long = chosen("common-shapes", lambda line: line["sq"] == 4096 and line["hq"] == 8)
    one = chosen("common-shapes", lambda line: line["hq"] == 1 and not _hides(line))
    sparse = chosen("common-shapes", lambda line: line["hq"] == 1 and _hides(line))
    over_naive = [race for race in one if race.get("naive") and race.best_ours]
    return [
        (
            "attention of Llama-2 7B, times as fast as the fastest backend of SDPA",
            "1.33 to 1.80",
            _span([race.speed_up for race in llama]),
            f"{_lengths(llama)} tokens, causal",
        ),
        (
            "feed-forward network, times as fast as PyTorch",
            "1.51 to 1.68",
            _span([race.speed_up for race in networks]),
            f"Llama-2 7B's sizes, {_lengths(networks)} tokens",
        ),
        (
            "whole layer, times as fast as PyTorch",
            "1.42 to 1.78",
            _span([race.speed_up for race in layers]),
            f"Llama-2 7B, {_lengths(layers)} tokens",
        ),
        (
            "4096 tokens, times as fast as PyTorch's math path",
            "6.6",
            _span([_times(race.math, race.best_ours) for race in long]),
            f"8 heads, head dims {_values(long, 'd')}",
        ),
        (
            "one wide head on tensor cores, times as fast as `naive`",
            "51",
            _span([_times(race.get("naive"), race.best_ours) for race in over_naive], 0),
            f"{_values(over_naive, 'sq')} tokens, head dims {_values(over_naive, 'd')}",
        ),
        ("the relative error of that kernel", "1.3e-06", _errors(over_naive), "the same"),
        (
            "the relative error of causal, window and block mask",
            "1 to 5",
            _errors(sparse),
            f"one head, {_values(sparse, 'sq')} tokens, head dim {_values(sparse, 'd')}",
        ),
        ("these three, times as fast as the dense call", "", _beside_dense(sparse, one), "the same"),
    ]


def _beside_dense(sparse: Sequence[Race], dense: Sequence[Race]) -> str:
    """How many times as fast each call is as the call of its size that hides nothing."""
    sizes = ("b", "hq", "sq", "d")
    plain = {tuple(race.first[key] for key in sizes): race.best_ours for race in dense}
    found = [_times(plain.get(tuple(race.first[key] for key in sizes)), race.best_ours) for race in sparse]
    return ", ".join(f"{value:.2f}" for value in found if value is not None)


def _hides(line: Line) -> bool:
    return bool(line["causal"] or line.get("features"))


def _times(slow: Line | None, fast: Line | None) -> float | None:
    return slow["ms"] / fast["ms"] if slow and fast else None


def _span(found: Sequence[float | None], places: int = 2) -> str:
    """The least and the largest; empty without any.

    >>> _span([2.0, None, 3.5]), _span([2.0]), _span([None])
    ('2.00 to 3.50', '2.00', '')
    """
    values = [value for value in found if value is not None]
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(f"{value:.{places}f}" for value in ends))


def _errors(of: Sequence[Race]) -> str:
    found = [race.best_ours["relative_error"] for race in of if race.best_ours]
    ends = [f"{error:.1e}" for error in (min(found), max(found))] if found else []
    return " to ".join(dict.fromkeys(ends))


def _values(of: Sequence[Race], key: str) -> str:
    """The values of a field: one, or the least and the largest."""
    return _span([race.first[key] for race in of], 0)


def _lengths(of: Sequence[Race]) -> str:
    """The numbers of tokens, which other operations have among their sizes."""
    firsts = [race.first for race in of]
    return _span([line["sizes"]["tokens"] if "sizes" in line else line["sq"] for line in firsts], 0)
