"""Says which records in results/ are older than the sources of the kernels they measured.

The first line of a record holds the fingerprints of the kernels it was made with (see kernel_sources.py). The
record is current as long as no kernel that its lines ran has changed. Records of tests cover all sources, and
also hold a fingerprint of the tests.

    results_status.py                                    # the status of each record
    results_status.py --kernels                          # the fingerprints, as JSON
    results_status.py --tests                            # that of the tests
    results_status.py --sources                          # a line for each source, as sha256sum prints it
    results_status.py --renew KERNELS.json BEFORE AFTER  # see renew()
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import compare_code
from kernel_sources import TEST_FOLDERS, UNITS, Sources, kernels_of, of_all, sources_of

ROOT = Path(__file__).resolve().parent.parent
OF_TESTS = ("tests", "sanitizers", "soak")  # records; of builds for older GPUs, with "-sm75" or so

# Records of sweeps, which time the rows of a kernel's tables.
SWEPT = {
    "mma-sweep": "attention mma forward",
    "mma-backward-sweep": "attention mma backward",
    "mma-f32-sweep": "attention mma f32 forward",
    "mma-f32-backward-sweep": "attention mma f32 backward",
}

Line = dict[str, Any]


def listing(sources: Sources) -> str:
    return "".join(f"{hashlib.sha256(sources[name]).hexdigest()}  {name}\n" for name in sorted(sources))


def tests_of(root: Path) -> str:
    return of_all(sources_of(root, TEST_FOLDERS))


def of_operation(*operations: str) -> set[str]:
    """The kernels of some operations, and the code that chooses among them."""
    return {name for name in UNITS if name.split()[0] in operations} | {"choice"}


def attention_of(line: Line) -> set[str]:
    impl = line["impl"]
    if f"attention {impl}" in UNITS:  # one for both passes
        return {f"attention {impl}"}
    passes = [p for p in ("forward", "backward") if p in (line.get("pass") or line.get("direction") or p)]
    types = (" f32", "") if line.get("dtype") is None else (" f32",) if line["dtype"] == "f32" else ("",)
    found = {f"attention {impl}{dtype} {pas}" for dtype in types for pas in passes} & UNITS.keys()
    if not found and any(name.startswith(f"attention {impl} ") for name in UNITS):
        found = {f"attention {impl} {pas}" for pas in passes} & UNITS.keys()  # one for all types
    return found or of_operation("attention")


def ran(line: Line, suite: str) -> set[str]:
    """The kernels that a line of a record ran; all of them where the line does not say."""
    op, impl = line.get("op"), str(line.get("impl", ""))
    if op == "rate" or impl.startswith("torch ") or line.get("skipped") or line.keys() <= {"finished"}:
        return set()
    if op in ("attention", "profile") and impl:
        return attention_of(line)
    if op == "gemm":
        return {f"gemm {impl}"} if f"gemm {impl}" in UNITS else of_operation("gemm")
    if op in ("norm", "rope"):
        return {str(op)}
    if op == "ffn":
        return of_operation("gemm", "ffn")
    if op == "sweep" and suite in SWEPT:
        return {SWEPT[suite]}
    return {*UNITS} if op else {*UNITS, "everything"}


def kernels_ran(lines: Iterable[Line], suite: str) -> set[str]:
    return set().union(*(ran(line, suite) for line in lines))


def failures(lines: list[Line]) -> str:
    """What a record of tests says at its end, where not all passed."""
    failed = lines[-1].get("total", {}).get("failed", 0)
    return f", WITH {failed} FAILED" if failed else ""


def status(record: Path, now: dict[str, str], tests: str) -> str:
    try:
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        environment = lines[0]["environment"]
        date = environment.get("date", "an unknown day") + failures(lines)
        measured = kernels_ran(lines[1:], record.stem)
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        return "not a record: its first line is no environment"
    if "kernels" not in environment:
        if "sources" in environment:
            return f"OLDER than the sources, from {date}"
        return "does not say which sources it was made from"
    changed = sorted(name for name in measured if environment["kernels"].get(name) != now.get(name))
    if changed:
        few = 4  # more are counted
        more = f" and {len(changed) - few} more" if len(changed) > few else ""
        return f"OLDER than the sources of {', '.join(changed[:few])}{more}, from {date}"
    if record.stem.partition("-sm")[0] in OF_TESTS and environment.get("tests") != tests:
        return f"OLDER than the tests, from {date}"
    return f"current, from {date}"


def renew(records: Iterable[Path], before: dict[str, str], now: dict[str, str]) -> int:
    """Writes the new fingerprints into records that had those from before a change of names alone.

    The caller must know that the machine code is the same; main() compares it. The fingerprint of everything
    is not renewed, because it covers host code.
    """
    renewed = 0
    for record in records:
        first, *rest = record.read_text().splitlines()
        line = json.loads(first)
        kernels = line["environment"].get("kernels", {})
        fresh = {
            name: now.get(name, old) if name != "everything" and before.get(name) == old else old
            for name, old in kernels.items()
        }
        if fresh != kernels:
            line["environment"]["kernels"] = fresh
            record.write_text("\n".join([json.dumps(line), *rest]) + "\n")
            renewed += 1
    return renewed


def main() -> int:
    match sys.argv[1:]:
        case ["--sources"]:
            print(listing(sources_of(ROOT)), end="")
            return 0
        case ["--tests"]:
            print(tests_of(ROOT))
            return 0
    now = kernels_of(sources_of(ROOT))
    records = sorted((ROOT / "results").glob("*/*.jsonl"))
    match sys.argv[1:]:
        case ["--kernels"]:
            print(json.dumps(now, indent=2))
        case ["--renew", kernels, before, after]:
            codes = [compare_code.code_of(Path(side)) for side in (before, after)]
            if compare_code.report(*codes) != 0:
                print("The machine code is not the same: no record was renewed.")
                return 1
            print(f"{renew(records, json.loads(Path(kernels).read_text()), now)} records renewed")
        case []:
            for record in records:
                print(f"{record.relative_to(ROOT)}: {status(record, now, tests_of(ROOT))}")
            if not records:
                print("no records; docs/gpu.md says how they are made")
        case _:
            print((__doc__ or "").split("\n\n")[-1], file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
