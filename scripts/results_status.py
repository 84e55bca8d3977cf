"""Says which records in results/ are older than the sources of the kernels they measured.

A record's first line holds the fingerprint of the sources it was made from. `--sources` prints what that is
the SHA-256 of: a line for each file, as sha256sum prints and checks it. A record of some kernels alone stays
current as long as none of their files changed: that is looked up in the repository's last commits. Records of
tests hold a fingerprint of these, too (`--tests`).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include", "src/attention", "src/core", "src/cuda")
TEST_FOLDERS = ("tests/core", "tests/attention", "tests/cpu", "tests/cuda", "tests/property", "tests/support")
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
OF_TESTS = ("tests", "sanitizers")  # records
COMMITS = 50  # of those that changed sources

# Records of a part of the kernels: where their files begin. All others are of everything.
BEGINNINGS = {
    "gemm": ("src/cuda/gemm/",),
    "ffn": ("src/cuda/gemm/", "src/cuda/ffn/"),
    "norm": ("src/cuda/norm/", "src/cuda/rope/"),
    "mma-sweep": ("src/cuda/mma/forward",),
    "mma-backward-sweep": ("src/cuda/mma/backward",),
    "mma-f32-sweep": ("src/cuda/mma_f32/forward",),
    "mma-f32-backward-sweep": ("src/cuda/mma_f32/backward",),
}

Sources = dict[str, bytes]  # what each file has, by its name


def sources_of(root: Path, folders: Iterable[str] = FOLDERS) -> Sources:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES
    }


def listing(sources: Sources) -> str:
    return "".join(f"{hashlib.sha256(sources[name]).hexdigest()}  {name}\n" for name in sorted(sources))


def fingerprint_of(sources: Sources) -> str:
    return hashlib.sha256(listing(sources).encode()).hexdigest()


def git(root: Path, *arguments: str) -> bytes:
    """What it says; nothing where there is no git, or no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""


def sources_at(root: Path, commit: str) -> Sources:
    sources = {}
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", commit, *FOLDERS))) as archive:
        for member in archive:
            if member.isfile() and Path(member.name).suffix in SUFFIXES:
                sources[member.name] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return sources


@functools.cache
def sources_of_fingerprint(root: Path, fingerprint: str) -> Sources:
    """Those of the last commit that has it; none where it is too long ago."""
    for commit in git(root, "log", f"-{COMMITS}", "--format=%H", "--", *FOLDERS).decode().split():
        sources = sources_at(root, commit)
        if fingerprint_of(sources) == fingerprint:
            return sources
    return {}


def reached(sources: Sources, beginnings: Iterable[str]) -> set[str]:
    """Files that those below some folders are made of: what they include, and what defines what is declared
    there, which has the same name."""
    found: set[str] = set()
    left = [name for name in sources if name.startswith(tuple(beginnings))]
    while left:
        name = left.pop()
        if name in found or name not in sources:
            continue
        found.add(name)
        left += [str(Path(name).with_suffix(suffix)) for suffix in SUFFIXES]
        for included in re.findall(rb'^#include "([^"]+)"', sources[name], re.MULTILINE):
            left += [f"{folder}/{included.decode()}" for folder in ("src", "include")]
    return found


def untouched(suite: str, made_from: str, now: Sources, root: Path) -> bool:
    """Whether no file that a suite measures changed since its record was made."""
    beginnings = BEGINNINGS.get(suite, ())
    before = sources_of_fingerprint(root, made_from) if beginnings else {}
    if not before:
        return False
    names = reached(now, beginnings) | reached(before, beginnings)
    return all(before.get(name) == now.get(name) for name in names)


def failures(lines: list[str]) -> str:
    """What a record of tests says at its end, where not all passed."""
    failed = json.loads(lines[-1]).get("total", {}).get("failed", 0)
    return f", WITH {failed} FAILED" if failed else ""


def status(record: Path, now: Sources, root: Path) -> str:
    try:
        lines = record.read_text().splitlines()
        environment = json.loads(lines[0])["environment"]
        made_from, date = environment.get("sources"), environment.get("date", "an unknown day")
        date += failures(lines)
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        return "not a record: its first line is no environment"
    if made_from is None:
        return "does not say which sources it was made from"
    if made_from == fingerprint_of(now):
        tests = fingerprint_of(sources_of(root, TEST_FOLDERS)) if record.stem in OF_TESTS else None
        if environment.get("tests") != tests:
            return f"OLDER than the tests, from {date}"
        return f"current, from {date}"
    if untouched(record.stem, made_from, now, root):
        return f"current, from {date}: other sources changed, none of those it measures"
    return f"OLDER than the sources, from {date}"


def main() -> None:
    now = sources_of(ROOT)
    if sys.argv[1:] == ["--sources"]:
        print(listing(now), end="")
        return
    if sys.argv[1:] == ["--tests"]:
        print(listing(sources_of(ROOT, TEST_FOLDERS)), end="")
        return
    records = sorted((ROOT / "results").glob("*/*.jsonl"))
    print(f"sources of the kernels: {fingerprint_of(now)}")
    for record in records:
        print(f"  {record.relative_to(ROOT)}: {status(record, now, ROOT)}")
    if not records:
        print("  no records; docs/gpu.md says how they are made")


if __name__ == "__main__":
    main()
