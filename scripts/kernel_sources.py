"""Fingerprints of the kernels' sources, by which a record says what it measured.

A kernel is made of units: the sources that are compiled for it and the files they include. Its fingerprint is
the hash of declarations: of all in its operation's folder of src/cuda, and of those in other files that these
use, directly or through others. Files that only concern the host (HOST) do not count. It does not matter in
which file a declaration is, nor in which order they come; comments, blank space, include lines and namespaces
do not count. So moving or renaming a file, or splitting a header, changes no fingerprint. A change counts for
those kernels that use what has changed. No compiler is needed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
COMPILED = (".cpp", ".cu")
OPERATIONS = ("attention", "ffn", "gemm", "layer", "norm", "rope")
FOLDERS = ("include", *(f"src/{name}" for name in (*OPERATIONS, "core", "cuda")))
TEST_FOLDERS = tuple(
    f"tests/{name}" for name in ("attention", "core", "cpu", "cuda", "layer", "property", "soak", "support")
)

# Files below include/ and src/ that say nothing of what runs on a GPU, as beginnings of their names.
HOST = (
    "include/tilewise/context",
    "include/tilewise/error",
    "src/core/arena",
    "src/core/debug",
    "src/core/kernel_list",
    "src/core/reasons",
    "src/cuda/attention/common/pieces",
    *(f"src/cuda/runtime/{name}" for name in ("check", "code.cu", "cublaslt", "device", "owner", "range")),
)

# The units of each kernel, as paths below src/. A folder stands for all sources in it. A `+` marks a file
# that counts without what it includes. If a header of src/cuda is included, the source of the same name is a
# unit, too: it defines what the header declares.
_SIMT, _SM80, _SM90 = (f"cuda/attention/{name}" for name in ("simt", "sm80", "sm90"))
_COMMON = "cuda/attention/common"
_FUSED_FORWARD = (f"{_SIMT}/forward",)
_STARTS = f"{_COMMON}/backward/ordered_starts.cu"  # of packed calls
_FUSED_BACKWARD = (f"{_SIMT}/backward", _STARTS)
_TILES_OF_BACKWARD = (f"{_COMMON}/backward/prepare.cu", f"{_COMMON}/backward/finish.cu", _STARTS)
UNITS: dict[str, tuple[str, ...]] = {
    "attention naive": (f"{_SIMT}/naive.cu",),
    "attention tiled": (f"{_SIMT}/tiled.cu",),
    "attention fused forward": _FUSED_FORWARD,
    "attention fused backward": _FUSED_BACKWARD,
    "attention mma forward": (f"{_SM80}/forward", f"{_SM80}/decode"),
    "attention mma backward": (
        f"{_SM80}/backward",
        *_TILES_OF_BACKWARD,
        f"{_SIMT}/backward/row_states.cu",
        f"{_SIMT}/backward/mask_gradient.cu",
    ),
    # Heads whose numbers do not fit are left to fused.
    "attention mma f32 forward": (f"{_SM80}/forward_f32", *_FUSED_FORWARD),
    "attention mma f32 backward": (f"{_SM80}/backward_f32", *_FUSED_BACKWARD),
    "attention wgmma forward": (f"{_SM90}/forward", f"{_SM90}/decode"),
    "attention wgmma backward": (f"{_SM90}/backward",),
    # Widens its inputs for the f32 kernels.
    "attention widened": (
        "cuda/attention/widened/widened.cu",
        f"{_SM80}/forward_f32",
        f"{_SM80}/backward_f32",
        *_FUSED_FORWARD,
        *_FUSED_BACKWARD,
    ),
    "attention wgmma f32 forward": (f"{_SM90}/forward_f32", *_FUSED_FORWARD),
    "gemm simt": ("cuda/gemm/simt",),
    "gemm mma": ("cuda/gemm/sm80",),
    "gemm wgmma": ("cuda/gemm/sm90/tiles",),
    "gemm few_rows": ("cuda/gemm/sm90/few_rows",),
    "gemm split": ("cuda/gemm/sm90/split", "cuda/gemm/simt"),
    "gemm cublaslt": ("cuda/gemm/cublaslt/activate.cu", "+cuda/gemm/cublaslt/cublaslt.cpp"),
    "norm": ("cuda/norm/simt", "cuda/norm/sm90"),
    "rope": ("cuda/rope/simt",),
    "ffn": ("cuda/ffn/simt",),
    # Which kernel takes a call that names none.
    "choice": (
        *(f"+{name}/select.cpp" for name in ("attention", "gemm", "norm", "rope", "ffn")),
        *(f"+cuda/{name}/kernels.cpp" for name in ("gemm", "norm", "rope", "ffn")),
        *(f"+cuda/attention/{name}/kernels.cpp" for name in ("simt", "sm80", "sm90", "wide", "widened")),
        "+cuda/gemm/cublaslt/kernel.cpp",
        f"+{_COMMON}/f32/limits.h",
    ),
}
# Kernels that run others: wide leaves its products to gemm.
UNITS["attention wide"] = (
    "cuda/attention/wide/wide.cu",
    *(unit for name in UNITS if name.startswith("gemm") for unit in UNITS[name]),
)
UNITS["attention wide_batched"] = ("cuda/attention/sm90/wide/batched.cu", *UNITS["gemm split"])

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


@dataclass(frozen=True)
class Item:
    """A declaration: its hash, all names in it, and those by which others can use it."""

    digest: str
    names: frozenset[str]
    declares: frozenset[str]
    by_macro: bool  # a directive, or what a macro declares, whose names cannot be seen

    @staticmethod
    def of(text: str) -> Item:
        digest = hashlib.sha256(text.encode()).hexdigest()
        by_macro = text.startswith("#") or re.match(r"[A-Z][A-Z0-9_]+ \(", text) is not None
        return Item(digest, frozenset(_WORDS.findall(text)), frozenset(_declared(text)), by_macro)

    def is_used(self, names: set[str]) -> bool:
        return not self.declares.isdisjoint(names)


_WORDS = re.compile(r"[A-Za-z_]\w*")


def _declared(text: str) -> Iterator[str]:
    """The names that a declaration gives to others; rather too many than too few."""
    if text.startswith("#"):
        yield from _WORDS.findall(text)[1:2]  # of a macro
        return
    if text.endswith(") ;") and "{" not in text and "__device__" not in text:
        return  # a function of the host, which is defined elsewhere
    head = text.split(" {")[0]
    tokens = head.split(" ")
    if "operator" in tokens or tokens[0] in ("using", "typedef", "friend"):
        yield from _WORDS.findall(head)  # an operator is used without its name
        return
    depth = 0
    for at, token in enumerate(tokens):
        following = tokens[at + 1] if at + 1 < len(tokens) else ""
        before = tokens[at - 1] if at > 0 else ""
        ends = following in ("(", "=", ";", "[", "{", "<", "") or before in (
            "struct",
            "class",
            "enum",
            "union",
        )
        if depth == 0 and ends and _WORDS.fullmatch(token):
            yield token
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))


@functools.cache
def _items(data: bytes, with_strings: bool) -> tuple[Item, ...]:
    return tuple(Item.of(text) for text in declarations(data.decode(), with_strings))


def items_of(sources: Sources, name: str) -> tuple[Item, ...]:
    """Strings of a .cpp file are names and messages, which do not count. In device code strings count: they
    hold instructions."""
    return _items(sources[name], not name.endswith(".cpp"))


def digest_of(items: Iterable[Item]) -> str:
    return hashlib.sha256("\n".join(sorted(item.digest for item in items)).encode()).hexdigest()[:16]


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


def _own(name: str) -> bool:
    """Whether all declarations of a file count: it is in the folder of an operation."""
    return name.startswith(tuple(f"src/cuda/{operation}/" for operation in OPERATIONS))


def used_items(sources: Sources, units: Iterable[str]) -> list[Item]:
    """The declarations that units are made of."""
    units = tuple(units)
    alone = {f"src/{unit.removeprefix('+')}" for unit in units}
    found: list[Item] = []
    left: list[tuple[str, Item]] = []  # and the file of each
    for name in sorted(files_of(sources, units)):
        if _own(name) or name in alone:
            found.extend(items_of(sources, name))
        elif not name.startswith(HOST):
            left.extend((name, item) for item in items_of(sources, name))
    names: set[str] = set()
    files: set[str] = set()  # of which something is used
    fresh = found
    while fresh:
        names.update(*(item.names for item in fresh))
        files |= {file for file, item in left if item.is_used(names)}
        used = [item.is_used(names) or (item.by_macro and file in files) for file, item in left]
        fresh = [item for (_, item), take in zip(left, used, strict=True) if take]
        left = [entry for entry, take in zip(left, used, strict=True) if not take]
        found = found + fresh
    return found


def kernels_of(sources: Sources) -> dict[str, str]:
    """The fingerprint of each kernel, and of all sources together."""
    prints = {name: digest_of(used_items(sources, units)) for name, units in sorted(UNITS.items())}
    return {**prints, "everything": of_all(sources)}


def of_all(sources: Sources) -> str:
    return digest_of(item for name in sources for item in items_of(sources, name))
