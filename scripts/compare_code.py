"""Says which kernels' machine code differs between two builds.

Each side is an object file, a library, a program, a folder of object files, or what `--write` saved of one.
A change that only moves or renames sources leaves the machine code of every kernel as it was:

    compare_code.py before/src after/src        # exit status 1 if some kernel differs, is missing or is new
    compare_code.py --write before.json before/src

Kernels are compared by architecture and name. Namespaces are dropped from names, and with them the hash that
the compiler makes of a path for an unnamed namespace. Kernels that then have the same name are compared as a
group. If a name is gone and a new one has the same code, the kernel was renamed, which is no difference. The
comparison covers instructions, constants, the number of registers and the static shared memory, but not PTX.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
MACHINE_CODE = 2  # the kind of an entry; 1 is PTX
ZSTD, LZ4 = 0x8000, 0x2000  # flags of an entry
PER_KERNEL = (".nv.constant2.", ".nv.constant3.", ".nv.shared.")

Code = dict[str, list[str]]  # digests of the kernels that have this architecture and name


class NotCode(Exception):
    """The bytes are not what they were taken for."""


def sections(elf: bytes) -> Iterator[tuple[str, int, int, bytes]]:
    """Name, info, size and bytes of each section of a 64-bit ELF file; no bytes where it stores none."""
    if elf[:4] != b"\x7fELF" or elf[4] != 2:
        raise NotCode("expected a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = elf[headers[names_at][4] :] if headers else b""
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        text = names[name : names.index(b"\0", name)].decode()
        stored = b"" if kind == 8 else elf[offset : offset + length]  # 8: NOBITS
        yield text, info, length, stored


def unpacked(data: bytes, flags: int) -> bytes:
    if flags & ZSTD:
        program = shutil.which("zstd")
        if program is None:
            raise NotCode("the code is compressed, and there is no program zstd to unpack it")
        return subprocess.run([program, "-dc"], input=data, capture_output=True, check=True).stdout
    if flags & LZ4:
        raise NotCode("the code is compressed by LZ4; compile with --compress-mode=none")
    return data


def cubins(fatbin: bytes) -> Iterator[tuple[int, bytes]]:
    """Architecture and ELF file of each entry that is machine code. Containers follow each other."""
    at = 0
    while at + 16 <= len(fatbin):
        magic, _, header, size = struct.unpack_from("<IHHQ", fatbin, at)
        if magic != FATBIN_MAGIC:
            at += 8  # they begin at multiples of 8
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, own, padded, packed = struct.unpack_from("<HHIQI", fatbin, entry)
            (architecture,) = struct.unpack_from("<I", fatbin, entry + 28)
            (flags,) = struct.unpack_from("<Q", fatbin, entry + 40)
            data = fatbin[entry + own : entry + own + (packed or padded)]
            if kind == MACHINE_CODE:
                yield architecture, unpacked(data, flags)
            entry += own + padded
        at = end


def kernels(cubin: bytes) -> dict[str, str]:
    """The digest of each function's code, by its mangled name."""
    found: dict[str, list[bytes]] = {}
    belongs: dict[str, list[bytes]] = collections.defaultdict(list)
    for name, info, length, stored in sections(cubin):
        if name.startswith(".text."):
            registers = info >> 24
            found[name.removeprefix(".text.")] = [struct.pack("<I", registers), stored]
        for prefix in PER_KERNEL:
            if name.startswith(prefix):
                belongs[name.removeprefix(prefix)] += [prefix.encode(), struct.pack("<Q", length), stored]
    return {
        name: hashlib.sha256(b"".join(parts + belongs[name])).hexdigest()[:16]
        for name, parts in found.items()
    }


def demangled(names: list[str]) -> list[str]:
    program = shutil.which("c++filt")
    if program is None or not names:
        return names
    output = subprocess.run([program], input="\n".join(names), capture_output=True, check=True, text=True)
    return output.stdout.splitlines()


def plain_name(name: str) -> str:
    """A demangled name without namespaces."""
    name = name.replace("(anonymous namespace)::", "")
    return re.sub(r"\b(?:[A-Za-z_]\w*::)+(?=[A-Za-z_~])", "", name)


def members(archive: bytes) -> Iterator[bytes]:
    """The files in a static library."""
    at = 8
    while at + 60 <= len(archive):
        size = int(archive[at + 48 : at + 58])
        yield archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def code_of_file(data: bytes) -> Iterator[tuple[int, dict[str, str]]]:
    if data[:8] == b"!<arch>\n":
        for member in members(data):
            if member[:4] == b"\x7fELF":
                yield from code_of_file(member)
        return
    for name, _, _, stored in sections(data):
        if name == ".nv_fatbin":
            for architecture, cubin in cubins(stored):
                yield architecture, kernels(cubin)


def code_of(path: Path) -> Code:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    files = sorted(path.rglob("*.o")) if path.is_dir() else [path]
    if not files:
        raise NotCode("no object files in it")
    found: list[tuple[int, str, str]] = []
    for file in files:
        data = file.read_bytes()
        for architecture, digests in code_of_file(data):
            found += [(architecture, name, digest) for name, digest in digests.items()]
    code: Code = collections.defaultdict(list)
    for (architecture, _, digest), name in zip(found, demangled([entry[1] for entry in found]), strict=True):
        code[f"sm_{architecture} {plain_name(name)}"].append(digest)
    return {name: sorted(digests) for name, digests in sorted(code.items())}


def architectures(code: Code) -> set[str]:
    return {name.split(" ", 1)[0] for name in code}


def differences(before: Code, after: Code) -> dict[str, list[str]]:
    """Of the architectures that both have."""
    both = architectures(before) & architectures(after)
    before, after = (
        {n: d for n, d in code.items() if n.split(" ", 1)[0] in both} for code in (before, after)
    )
    missing = sorted(before.keys() - after.keys())
    new = sorted(after.keys() - before.keys())
    renamed = []
    for name in list(missing):
        architecture = name.split(" ", 1)[0]
        same = [
            n for n in new if n.startswith(f"{architecture} ") and sorted(after[n]) == sorted(before[name])
        ]
        if same:
            renamed.append(f"{name} -> {same[0].split(' ', 1)[1]}")
            missing.remove(name)
            new.remove(same[0])
    return {
        "missing": missing,
        "new": new,
        "different": sorted(n for n in before.keys() & after.keys() if sorted(before[n]) != sorted(after[n])),
        "renamed": renamed,
    }


def report(before: Code, after: Code) -> int:
    for name, code, other in (("before", before, after), ("after", after, before)):
        alone = sorted(architectures(code) - architectures(other))
        if alone:
            print(f"not compared, since only {name} has it: {', '.join(alone)}")
    found = differences(before, after)
    for what, names in found.items():
        for name in names:
            print(f"{what}: {name}")
    both = architectures(before) & architectures(after)
    for architecture in sorted(both):
        counts = [
            sum(len(d) for n, d in c.items() if n.startswith(f"{architecture} ")) for c in (before, after)
        ]
        print(f"{architecture}: {counts[0]} kernels before, {counts[1]} after")
    renamed = len(found.pop("renamed"))
    total = sum(len(names) for names in found.values())
    if not both:
        print("no architecture is in both")
        return 1
    counts_found = ", ".join(f"{len(names)} {what}" for what, names in found.items())
    print(f"machine code is the same ({renamed} renamed)" if total == 0 else counts_found)
    return 0 if total == 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--write", type=Path, metavar="JSON", help="save the code of one side, compare nothing"
    )
    parser.add_argument("sides", type=Path, nargs="+", metavar="SIDE")
    arguments = parser.parse_args()
    expected = 1 if arguments.write else 2
    if len(arguments.sides) != expected:
        parser.error(f"expected {expected} side(s), got {len(arguments.sides)}")
    codes = []
    for side in arguments.sides:
        try:
            codes.append(code_of(side))
        except (NotCode, OSError) as error:
            print(f"{side}: {error}", file=sys.stderr)
            return 2
    if arguments.write:
        arguments.write.write_text(json.dumps(codes[0], indent=0))
        print(f"{arguments.write}: {sum(map(len, codes[0].values()))} kernels")
        return 0
    return report(*codes)


if __name__ == "__main__":
    sys.exit(main())
