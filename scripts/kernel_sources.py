"""Fingerprints of the kernels' sources, by which a record says what it measured.

A kernel is made of units: the sources that are compiled for it and the files they include. Its fingerprint is
the hash of all declarations in these files. It does not depend on which file a declaration is in, or on their
order; comments, blank space, include lines and namespaces do not count. So moving or renaming a file, or
splitting a header, changes no fingerprint. A changed declaration changes the fingerprints of those kernels
that include its file. No compiler is needed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
COMPILED = (".cpp", ".cu")
OPERATIONS = ("attention", "ffn", "gemm", "layer", "norm", "rope")
FOLDERS = ("include", *(f"src/{name}" for name in (*OPERATIONS, "core", "cuda")))
TEST_FOLDERS = tuple(f"tests/{name}" for name in ("attention", "core", "cpu", "cuda", "property", "support"))

# The units of each kernel, as paths below src/. A folder stands for all sources in it. A `+` marks a file
# that counts without what it includes: host code that decides if the kernel is taken. If a header of src/cuda
# is included, the source of the same name, which defines what the header declares, is a unit, too.
_SIMT, _SM80, _SM90 = (f"cuda/attention/{name}" for name in ("simt", "sm80", "sm90"))
_FUSED_FORWARD = (f"{_SIMT}/forward", f"+{_SIMT}/kernels.cpp")
_STARTS = "cuda/attention/common/backward/ordered_starts.cu"  # of packed calls
_FUSED_BACKWARD = (f"{_SIMT}/backward", _STARTS, f"+{_SIMT}/kernels.cpp")
_TILES_OF_BACKWARD = ("cuda/attention/common/backward/prepare.cu", "cuda/attention/common/backward/finish.cu")
_LIMITS = "+cuda/attention/common/f32/limits.h"
_GEMM = "+cuda/gemm/kernels.cpp"
UNITS: dict[str, tuple[str, ...]] = {
    "attention naive": (f"{_SIMT}/naive.cu", f"+{_SIMT}/kernels.cpp"),
    "attention tiled": (f"{_SIMT}/tiled.cu", f"+{_SIMT}/kernels.cpp"),
    "attention fused forward": _FUSED_FORWARD,
    "attention fused backward": _FUSED_BACKWARD,
    "attention mma forward": (f"{_SM80}/forward", f"{_SM80}/decode", f"+{_SM80}/kernels.cpp"),
    "attention mma backward": (
        f"{_SM80}/backward",
        *_TILES_OF_BACKWARD,
        f"{_SIMT}/backward/row_states.cu",
        f"{_SIMT}/backward/mask_gradient.cu",
        _STARTS,
        f"+{_SM80}/kernels.cpp",
    ),
    # Heads whose numbers do not fit are left to fused.
    "attention mma f32 forward": (f"{_SM80}/forward_f32", _LIMITS, f"+{_SM80}/kernels.cpp", *_FUSED_FORWARD),
    "attention mma f32 backward": (
        f"{_SM80}/backward_f32",
        _LIMITS,
        f"+{_SM80}/kernels.cpp",
        *_FUSED_BACKWARD,
    ),
    "attention wgmma forward": (f"{_SM90}/forward", f"{_SM90}/decode", f"+{_SM90}/kernels.cpp"),
    "attention wgmma backward": (f"{_SM90}/backward", *_TILES_OF_BACKWARD, _STARTS, f"+{_SM90}/kernels.cpp"),
    "attention wgmma f32 forward": (
        f"{_SM90}/forward_f32",
        _LIMITS,
        f"+{_SM90}/kernels.cpp",
        *_FUSED_FORWARD,
    ),
    "gemm simt": ("cuda/gemm/simt", _GEMM),
    "gemm mma": ("cuda/gemm/sm80", _GEMM),
    "gemm wgmma": ("cuda/gemm/sm90/tiles", _GEMM),
    "gemm few_rows": ("cuda/gemm/sm90/few_rows", _GEMM),
    "gemm split": ("cuda/gemm/sm90/split", "cuda/gemm/simt", _GEMM),
    "gemm cublaslt": ("cuda/gemm/cublaslt",),
    "norm": ("cuda/norm/simt", "cuda/norm/sm90", "+cuda/norm/kernels.cpp"),
    "rope": ("cuda/rope/simt", "+cuda/rope/kernels.cpp"),
    "ffn": ("cuda/ffn/simt", "+cuda/ffn/kernels.cpp"),
    "index checks": ("cuda/runtime/check_indices.cu",),
    # Which kernel takes a call that names none.
    "choice": tuple(f"+{name}/select.cpp" for name in ("attention", "gemm", "norm", "rope", "ffn")),
}
# Kernels that run others: wide leaves its products to gemm.
UNITS["attention wide"] = (
    "cuda/attention/wide",
    *(unit for name in UNITS if name.startswith("gemm") for unit in UNITS[name]),
)

Sources = dict[str, bytes]  # what each file has, by its name


def sources_of(root: Path, folders: Iterable[str] = FOLDERS) -> Sources:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES
    }


_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<raw>R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)")
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>(?<![0-9A-Fa-f])'(?:[^'\\\n]|\\.)+')
      | (?P<directive>(?<![^\n])[ \t]*\#(?:[^\n\\]|\\\n|\\.)*)
      | (?P<word>\w(?:[\w.]|'(?=\w))*)
      | (?P<blank>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str, with_strings: bool) -> Iterator[str]:
    for match in _TOKENS.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind in ("comment", "blank"):
            continue
        if kind in ("raw", "mark", "string") and not with_strings:
            token = '""'
        if kind == "directive":
            token = " ".join(re.sub(r"//.*|/\*.*?\*/|\\\n", " ", token).split())
            if re.match(r"# ?(include|pragma once)\b", token):
                continue
        yield token


def declarations(text: str, with_strings: bool = True) -> list[str]:
    """Those of a file, less comments, blank space, includes and the namespaces that they are in."""
    found: list[str] = []
    item: list[str] = []
    depth = 0
    tokens = list(_tokens(text, with_strings))
    for at, token in enumerate(tokens):
        if token.startswith("#") and not item:
            found.append(token)
            continue
        if token == "}" and depth == 0 and not item:
            continue  # of a namespace
        item.append(token)
        if token == "{" and depth == 0 and _opens_namespace(item):
            item = []
            continue
        depth += (token in "{([") - (token in "})]")
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        ends = token == ";" or (token == "}" and following not in (";", ",", "(", "{", ".", "="))
        if depth <= 0 and ends:
            found.append(" ".join(item))
            item, depth = [], 0
    if item:
        found.append(" ".join(item))
    return found


def _opens_namespace(item: list[str]) -> bool:
    return item[0] == "namespace" or item[:2] == ["inline", "namespace"]


@functools.cache
def _digests(data: bytes, with_strings: bool) -> tuple[str, ...]:
    return tuple(
        hashlib.sha256(item.encode()).hexdigest() for item in declarations(data.decode(), with_strings)
    )


def digest_of(sources: Sources, names: Iterable[str]) -> str:
    """Of all declarations in some files. Strings of a .cpp file are names and messages: they do not count, as
    those of device code do, which has instructions in them."""
    items = sorted(item for name in set(names) for item in _digests(sources[name], not name.endswith(".cpp")))
    return hashlib.sha256("\n".join(items).encode()).hexdigest()[:16]


def _included(sources: Sources, name: str) -> Iterator[str]:
    for path in re.findall(rb'^#include "([^"]+)"', sources[name], re.MULTILINE):
        for folder in ("src", "include"):
            if (full := f"{folder}/{path.decode()}") in sources:
                yield full


def files_of(sources: Sources, units: Iterable[str]) -> set[str]:
    """The files that units are made of."""
    found: set[str] = set()
    left: list[str] = []
    for unit in units:
        path = f"src/{unit.removeprefix('+')}"
        below = [n for n in sources if n == path or (n.startswith(f"{path}/") and n.endswith(COMPILED))]
        if unit.startswith("+"):
            found.update(below)
        else:
            left += below
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        left += _included(sources, name)
        if name.startswith("src/cuda/"):
            left += [n for suffix in COMPILED if (n := str(Path(name).with_suffix(suffix))) in sources]
    return found


def kernels_of(sources: Sources) -> dict[str, str]:
    """The fingerprint of each kernel, and of all sources together."""
    prints = {name: digest_of(sources, files_of(sources, units)) for name, units in sorted(UNITS.items())}
    return {**prints, "everything": digest_of(sources, sources)}
