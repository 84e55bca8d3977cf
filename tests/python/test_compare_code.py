"""scripts/compare_code.py: which kernels' machine code differs between two builds."""

from __future__ import annotations

import importlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBITS = 8


@pytest.fixture
def compare_code(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (ROOT / "scripts/compare_code.py").exists():
        pytest.skip("a staged tree has no sources")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("compare_code")


def elf(sections: list[tuple[str, int, int, bytes]]) -> bytes:
    """A 64-bit ELF file of sections (name, kind, info, bytes), and one with their names."""
    sections = [("", 0, 0, b""), *sections, (".shstrtab", 3, 0, b"")]
    names = b"".join(name.encode() + b"\0" for name, *_ in sections)
    sections[-1] = (".shstrtab", 3, 0, names)
    body, headers, at_name = b"", b"", 0
    for name, kind, info, data in sections:
        headers += struct.pack("<IIQQQQIIQQ", at_name, kind, 0, 0, 64 + len(body), len(data), 0, info, 0, 0)
        at_name += len(name) + 1
        body += b"" if kind == NOBITS else data
    start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    numbers = struct.pack(
        "<HHIQQQIHHHHHH", 1, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(sections), 0
    )
    numbers = numbers[:-2] + struct.pack("<H", len(sections) - 1)
    return start + numbers + body + headers


def cubin(kernels: dict[str, bytes], registers: int = 32, shared: int = 0) -> bytes:
    sections = []
    for name, code in kernels.items():
        sections += [
            (f".text.{name}", 1, registers << 24, code),
            (f".nv.shared.{name}", NOBITS, 0, b"\0" * shared),
        ]
    return elf(sections)


def entry(architecture: int, data: bytes, kind: int = 2, flags: int = 0) -> bytes:
    data += b"\0" * (-len(data) % 8)
    header = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(data), 0, 0, 8, 1, architecture, 0, 0, flags, 0, 0
    )
    return header + data


def host_object(*entries: bytes) -> bytes:
    body = b"".join(entries)
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return elf([(".text", 1, 0, b"host"), (".nv_fatbin", 1, 0, fatbin)])


def library(*members: bytes) -> bytes:
    out = b"!<arch>\n"
    for number, data in enumerate(members):
        out += f"{number}.o/".ljust(48).encode() + str(len(data)).ljust(10).encode() + b"`\n"
        out += data + b"\n" * (len(data) % 2)
    return out


def code(compare_code: Any, path: Path, data: bytes) -> dict[str, list[str]]:
    path.write_bytes(data)
    found: dict[str, list[str]] = compare_code.code_of(path)
    return found


NOTHING: dict[str, list[str]] = {"missing": [], "new": [], "different": [], "renamed": []}
NAMED = "_ZN8tilewise4cuda3mma6kernelIfEEvT_"  # void tilewise::cuda::mma::kernel<float>(float)
MOVED = "_ZN8tilewise4cuda4sm806kernelIfEEvT_"  # the same in another namespace
UNNAMED = "_ZN8tilewise4cuda12_GLOBAL__N_16kernelIfEEvT_"  # and in an unnamed one


@pytest.mark.skipif(not shutil.which("c++filt"), reason="no c++filt")
@pytest.mark.parametrize("name", [MOVED, UNNAMED])
def test_a_kernel_in_another_namespace_is_the_same(compare_code: Any, tmp_path: Path, name: str) -> None:
    before = code(compare_code, tmp_path / "a.o", host_object(entry(90, cubin({NAMED: b"code"}))))
    after = code(compare_code, tmp_path / "b.o", host_object(entry(90, cubin({name: b"code"}))))
    assert list(before) == ["sm_90 void kernel<float>(float)"]
    assert compare_code.differences(before, after) == NOTHING


@pytest.mark.parametrize(
    "other",
    [cubin({"k": b"eodc"}), cubin({"k": b"code"}, registers=40), cubin({"k": b"code"}, shared=16)],
    ids=["instructions", "registers", "shared memory"],
)
def test_other_code_is_different(compare_code: Any, tmp_path: Path, other: bytes) -> None:
    before = code(compare_code, tmp_path / "a.o", host_object(entry(90, cubin({"k": b"code"}))))
    after = code(compare_code, tmp_path / "b.o", host_object(entry(90, other)))
    assert compare_code.differences(before, after) == {**NOTHING, "different": ["sm_90 k"]}
    assert compare_code.report(before, after) == 1
    assert compare_code.report(before, before) == 0


def test_kernels_come_and_go(compare_code: Any, tmp_path: Path) -> None:
    before = code(compare_code, tmp_path / "a.o", host_object(entry(80, cubin({"a": b"1", "b": b"2"}))))
    after = code(compare_code, tmp_path / "b.o", host_object(entry(80, cubin({"b": b"2", "c": b"3"}))))
    found = compare_code.differences(before, after)
    assert found == {**NOTHING, "missing": ["sm_80 a"], "new": ["sm_80 c"]}


def test_a_kernel_with_another_name_and_the_same_code_was_renamed(compare_code: Any, tmp_path: Path) -> None:
    before = code(compare_code, tmp_path / "a.o", host_object(entry(80, cubin({"a": b"1", "b": b"1"}))))
    after = code(compare_code, tmp_path / "b.o", host_object(entry(80, cubin({"c": b"1", "d": b"1"}))))
    found = compare_code.differences(before, after)
    assert found == {**NOTHING, "renamed": ["sm_80 a -> c", "sm_80 b -> d"]}
    assert compare_code.report(before, after) == 0
    one = code(compare_code, tmp_path / "c.o", host_object(entry(80, cubin({"c": b"1"}))))
    assert compare_code.differences(before, one)["missing"] == ["sm_80 b"]
    assert compare_code.report(before, one) == 1


def test_architectures_are_compared_by_themselves(compare_code: Any, tmp_path: Path) -> None:
    both = host_object(entry(80, cubin({"k": b"for 80"})), entry(90, cubin({"k": b"for 90"})))
    before = code(compare_code, tmp_path / "a.o", both)
    after = code(compare_code, tmp_path / "b.o", host_object(entry(90, cubin({"k": b"for 90"}))))
    assert sorted(before) == ["sm_80 k", "sm_90 k"]
    assert compare_code.differences(before, after) == NOTHING  # of what both have
    other = code(compare_code, tmp_path / "c.o", host_object(entry(75, cubin({"k": b"for 75"}))))
    assert compare_code.report(before, other) == 1  # nothing to compare is no proof


def test_ptx_is_not_looked_at(compare_code: Any, tmp_path: Path) -> None:
    data = host_object(entry(90, b"ptx", kind=1), entry(90, cubin({"k": b"code"})))
    assert list(code(compare_code, tmp_path / "a.o", data)) == ["sm_90 k"]


def test_libraries_folders_and_saved_code_are_the_same(compare_code: Any, tmp_path: Path) -> None:
    objects = [host_object(entry(90, cubin({name: name.encode()}))) for name in ("a", "b", "c")]
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for number, data in enumerate(objects):
        (folder / ("below" if number else ".") / f"{number}.o").write_bytes(data)
    found = compare_code.code_of(folder)
    assert sorted(found) == ["sm_90 a", "sm_90 b", "sm_90 c"]
    assert code(compare_code, tmp_path / "l.a", library(*objects)) == found
    (tmp_path / "saved.json").write_text(json.dumps(found))
    assert compare_code.code_of(tmp_path / "saved.json") == found


def test_what_is_no_code_is_refused(compare_code: Any, tmp_path: Path) -> None:
    with pytest.raises(compare_code.NotCode, match="ELF"):
        code(compare_code, tmp_path / "a.o", b"some text, not an object file")
    with pytest.raises(compare_code.NotCode, match="LZ4"):
        code(compare_code, tmp_path / "b.o", host_object(entry(90, b"x" * 8, flags=0x2000)))
    with pytest.raises(compare_code.NotCode, match="no object files"):
        (tmp_path / "empty").mkdir()
        compare_code.code_of(tmp_path / "empty")
