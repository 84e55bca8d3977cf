"""Rows for people: what is printed while a benchmark runs, and words for figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilewise.bench.kinds import AnyProblem
from tilewise.bench.records import Line, Record


def digits(value: float | None, count: int = 3) -> str:
    """So many digits, without an exponent where that is readable.

    >>> [digits(x) for x in (0.000123, 0.01234, 1.234, 12.34, 123.4, 1234.0, None)]
    ['1.2e-04', '0.0123', '1.23', '12.3', '123', '1234', '–']
    """
    if value is None:
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        return f"{value:.1e}"
    whole = len(str(int(size))) if size >= 1 else 0
    if size < 1:
        leading = 0 if size >= 0.1 else 1 if size >= 0.01 else 2
        return f"{value:.{count + leading}f}"
    return f"{value:.{max(0, count - whole)}f}"


def rate(tflops: float | None) -> str:
    """TFLOP/s, or GFLOP/s where that reads better.

    >>> rate(0.1234), rate(45.6), rate(None)
    ('123 GFLOP/s', '45.6 TFLOP/s', '–')
    """
    if tflops is None:
        return "–"
    return f"{digits(tflops)} TFLOP/s" if tflops >= 1 else f"{digits(1e3 * tflops)} GFLOP/s"


def share(percent: float) -> str:
    """A measured rate in another one, which is no limit.

    >>> share(91.6), share(99.97), share(109.8)
    ('92 % of', '1.00 times', '1.10 times')
    """
    return f"{percent:.0f} % of" if percent < 99.5 else f"{percent / 100:.2f} times"


def threads_of(count: Any) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def machine(environment: dict[str, Any]) -> str:
    name = environment.get("gpu") or environment.get("cpu") or "unknown machine"
    parts = [name]
    if "gpu" in environment:
        parts.append(f"driver {environment.get('driver', 'unknown')}")
    else:
        parts.append(threads_of(environment.get("threads")))
    if environment.get("torch"):
        parts.append(f"torch {environment['torch']}")
    version = environment.get("tilewise") or environment.get("version")
    return ", ".join([*parts, f"tilewise {version}"] if version else parts)


def rates(record: Record) -> str:
    words = {"gemm": "matrix product", "copy": "copy", "multiply-adds": "multiply-adds"}
    parts = []
    for line in record.highest():
        name = words.get(line["impl"])
        if not name:
            continue
        figure = rate(line["tflops"]) if line.get("tflops") else f"{digits(line.get('gbps'))} GB/s"
        parts.append(f"{name} {line['dtype']} {figure}" if line.get("dtype") else f"{name} {figure}")
    return "rates of this run: " + ", ".join(parts)


def unit(line: Line) -> tuple[str, float]:
    """What rates of a device are told in, and how many of it a TFLOP/s is."""
    return ("GFLOP/s", 1e3) if line.get("device") == "cpu" else ("TFLOP/s", 1.0)


def column(names: Iterable[str]) -> int:
    """The width of a column for these names and what parts them from the next.

    >>> column(["mma", "fused"]), column(["name_of_sixteen_"])
    (12, 18)
    """
    return max(12, 2 + max(map(len, names), default=0))


def header(line: Line) -> str:
    titles = (
        f"{'ms':>9}{unit(line)[0]:>10}{'% GEMM':>8}{'GB/s':>8}{'% copy':>8}{'spread':>8}{'MB':>9}{'error':>9}"
    )
    return f"  {'':24}{titles}"


def row(line: Line) -> str:
    """One implementation's figures, or why there are none."""
    name = f"  {line['impl']:24}"
    if line.get("ms") is None:
        return f"{name}  {line.get('skipped', 'not measured')[:100]}"
    tflops = line["tflops"] * unit(line)[1]
    of_gemm, of_copy = (digits(line.get(key)) for key in ("percent_of_peak", "percent_of_copy"))
    return name + (
        f"{digits(line['ms']):>9}{digits(tflops):>10}{of_gemm:>8}{digits(line['gbps']):>8}{of_copy:>8}"
        f"{line['spread']:>8.0%}{digits(line['peak_mb']):>9}"
        f"{'–' if line['error'] is None else format(line['error'], '.1e'):>9}"
    )


class Printer:
    """Prints a problem's rows; why something cannot take part is said once."""

    def __init__(self) -> None:
        self.told: set[tuple[str, str]] = set()

    def show(self, problem: AnyProblem, lines: Sequence[Line]) -> None:
        titles = header(lines[0])
        print(f"{problem!s:26}{titles[26:]}" if len(str(problem)) <= 26 else f"{problem}\n{titles}")
        for line in lines:
            reason = (line["impl"], line.get("skipped", ""))
            if reason[1] and reason in self.told:
                continue
            self.told.add(reason)
            print(row(line), flush=True)
