"""`tilewise roofline`: intensity and rate of each row, and which measured rate is nearer."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.bench.plots import intensity, roof_of
from tilewise.bench.records import Record
from tilewise.bench.summary import by_machine, name_of
from tilewise.bench.table import column, digits, machine, rate, rates
from tilewise.bench.words import type_of


def text(records: Sequence[Record]) -> str:
    """A table for each machine, its rows as the record has them."""
    lines: list[str] = []
    for record in by_machine(records):
        lines += ["", machine(record.environment), rates(record), ""]
        width = column(line["impl"] for line in record.rows)
        titles = f"{'problem':36}{'type':6}{'pass':10}{'who':{width}}{'FLOP/byte':>10}{'rate':>15}"
        lines.append(f"{titles}{'% of roof':>10}  bound by")
        for line in record.rows:
            if not line.get("ms") or not line.get("gbps"):
                continue
            words = f"{name_of(line):36}{type_of(line):6}{line['pass']:10}{line['impl']:{width}}"
            words += f"{digits(intensity(line)):>10}{rate(line['tflops']):>15}"
            if roof := roof_of(record, line):
                words += f"{100 * line['tflops'] / roof[0]:>10.0f}  {roof[1]}"
            lines.append(words)
    return "\n".join(lines[1:])
