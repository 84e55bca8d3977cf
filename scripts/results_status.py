"""Says which records in results/ are older than the sources of the kernels they measured.

A record's first line holds the fingerprint of the sources it was made from. `--sources` prints what that is
the SHA-256 of: a line for each file, as sha256sum prints and checks it.
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include", "src/attention", "src/core", "src/cuda")


def sources(root: Path) -> str:
    files = sorted(
        path.relative_to(root).as_posix()
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".cuh", ".cu")
    )
    return "".join(f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  {name}\n" for name in files)


def status(record: Path, fingerprint: str) -> str:
    try:
        with record.open() as lines:
            environment = json.loads(next(lines))["environment"]
        made_from, date = environment.get("sources"), environment.get("date", "an unknown day")
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError):
        return "not a record: its first line is no environment"
    if made_from is None:
        return "does not say which sources it was made from"
    return f"{'current' if made_from == fingerprint else 'OLDER than the sources'}, from {date}"


def main() -> None:
    if sys.argv[1:] == ["--sources"]:
        print(sources(ROOT), end="")
        return
    fingerprint = hashlib.sha256(sources(ROOT).encode()).hexdigest()
    records = sorted((ROOT / "results").glob("*/*.jsonl"))
    print(f"sources of the kernels: {fingerprint}")
    for record in records:
        print(f"  {record.relative_to(ROOT)}: {status(record, fingerprint)}")
    if not records:
        print("  no records; docs/gpu.md says how they are made")


if __name__ == "__main__":
    main()
