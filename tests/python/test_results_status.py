"""scripts/results_status.py and kernel_sources.py: which records are of the kernels as they are."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (ROOT / f"scripts/{name}.py").exists():
        pytest.skip("a staged tree has no sources")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def kernel_sources(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script("kernel_sources", monkeypatch)


@pytest.fixture
def results_status(kernel_sources: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return script("results_status", monkeypatch)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


NORM = """#include "cuda/norm/common/rows.h"
#include "cuda/ptx/add.cuh"

namespace tilewise::cuda::norm {

// Sums a row.
__global__ void forward(Rows rows) {
  for (int i = 0; i < rows.count; ++i) asm("add %0, 1;" ::"r"(add(i)));
}

}  // namespace tilewise::cuda::norm
"""
ROWS = """#pragma once

#include "tilewise/error.h"
#include "tilewise/norm.h"

namespace tilewise::cuda::norm {

struct Rows {
  int count = 0;
  Norm norm = Norm::rms;
};

inline constexpr int warps = 4;

}  // namespace tilewise::cuda::norm
"""
FILES = {
    "src/cuda/norm/simt/forward.cu": NORM,
    "src/cuda/norm/common/rows.h": ROWS,
    "src/cuda/norm/common/rows.cpp": "int rows_of(int n) { return n; }\n",
    "src/cuda/norm/kernels.cpp": 'bool suits(int n) { return n > 4; }\nconst char* name = "rows";\n',
    "src/cuda/attention/sm80/forward/plain_bf16.cu": "int mma() { return 1; }\n",
    "src/cuda/attention/sm80/backward/plain_bf16.cu": "int mma_backward() { return 1; }\n",
    "src/attention/call.h": "struct Call { int n; };\n",
    "include/tilewise/error.h": "struct Error { int code; };\n",
    "include/tilewise/norm.h": "enum class Norm { rms };\nvoid forward(Norm norm);\n",
    "src/cuda/ptx/add.cuh": "#define ADD(n) int a_##n() { return n; }\nADD(2)\nint add(int n) {}\n",
    "tests/cuda/norm/norm_test.cpp": "int test() { return 1; }\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Norms that include a header, whose functions are defined beside it; and attention, apart from them."""
    for name, text in FILES.items():
        write(tmp_path, name, text)
    return tmp_path


def kernels(kernel_sources: Any, root: Path) -> dict[str, str]:
    found: dict[str, str] = kernel_sources.kernels_of(kernel_sources.sources_of(root))
    return found


def changed(kernel_sources: Any, root: Path, before: dict[str, str]) -> set[str]:
    return {name for name, now in kernels(kernel_sources, root).items() if now != before[name]}


UNCHANGED = {
    "another file": ("src/cuda/norm/simt/forward.cu", "src/cuda/norm/simt/rms.cu", NORM),
    "comments and blank space": (
        "src/cuda/norm/simt/forward.cu",
        "src/cuda/norm/simt/forward.cu",
        NORM.replace("// Sums a row.", "/* Adds up\n a row. */")
        .replace("  for", "\n\n\tfor")
        .replace("i = 0", "i=0"),
    ),
    "another namespace": (
        "src/cuda/norm/simt/forward.cu",
        "src/cuda/norm/simt/forward.cu",
        NORM.replace("tilewise::cuda::norm {", "tilewise::cuda {\nnamespace {").replace("}  //", "}\n}  //"),
    ),
    "another order": (
        "src/cuda/norm/common/rows.h",
        "src/cuda/norm/common/rows.h",
        ROWS.replace("inline constexpr int warps = 4;\n", "").replace(
            "struct Rows", "inline constexpr int warps = 4;\n\nstruct Rows"
        ),
    ),
    "another message": (
        "src/cuda/norm/kernels.cpp",
        "src/cuda/norm/kernels.cpp",
        FILES["src/cuda/norm/kernels.cpp"].replace('"rows";', '"all rows";'),
    ),
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_what_makes_no_other_kernel_does_not_count(kernel_sources: Any, tree: Path, what: str) -> None:
    before = kernels(kernel_sources, tree)
    old, new, text = UNCHANGED[what]
    assert (old, FILES[old]) != (new, text), "nothing was changed"
    (tree / old).unlink()
    write(tree, new, text)
    assert changed(kernel_sources, tree, before) == set()


def test_a_header_may_move_and_be_split(kernel_sources: Any, tree: Path) -> None:
    before = kernels(kernel_sources, tree)
    (tree / "src/cuda/norm/common/rows.h").unlink()
    (tree / "src/cuda/norm/common/rows.cpp").unlink()
    write(tree, "src/cuda/norm/sm90/rows.h", ROWS.replace("inline constexpr int warps = 4;\n", ""))
    write(tree, "src/cuda/norm/sm90/rows.cpp", FILES["src/cuda/norm/common/rows.cpp"])
    write(tree, "src/cuda/norm/warps.h", "inline constexpr int warps = 4;\n")
    includes = '#include "cuda/norm/warps.h"\n#include "cuda/norm/sm90/rows.h"\n'
    moved = NORM.replace('#include "cuda/norm/common/rows.h"\n', includes)
    write(tree, "src/cuda/norm/simt/forward.cu", moved)
    assert changed(kernel_sources, tree, before) == set()


UNUSED = {
    "src/cuda/norm/kernels.cpp": ("n > 4", "n > 5", {"choice"}),  # it counts where a call names no kernel
    "include/tilewise/error.h": ("int code", "long code", set()),  # of the host alone
    "include/tilewise/norm.h": ("Norm norm", "Norm kind", set()),  # in a prototype
    "src/attention/call.h": ("int n", "long n", set()),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_no_kernel_uses_does_not_count(kernel_sources: Any, tree: Path, name: str) -> None:
    old, new, expected = UNUSED[name]
    before = kernels(kernel_sources, tree)
    assert old in FILES[name]
    write(tree, name, FILES[name].replace(old, new))
    assert changed(kernel_sources, tree, before) == {"everything", *expected}


CHANGED = {
    "src/cuda/norm/simt/forward.cu": [
        ("int i = 0", "int i = 1"),
        ("add %0, 1", "add %0, 2"),
        ("++i", "++ i, ++i"),
    ],
    "src/cuda/norm/common/rows.h": [("count = 0", "count = 1"), ("warps = 4", "warps = 8")],
    "src/cuda/norm/common/rows.cpp": [("return n", "return -n")],
    "include/tilewise/norm.h": [("rms", "layer")],
    "src/cuda/ptx/add.cuh": [
        ("add(int n)", "add(long n)"),
        ("() { return n", "() { return -n"),
        ("ADD(2)", "ADD(3)"),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new"), [(name, *pair) for name, pairs in CHANGED.items() for pair in pairs]
)
def test_a_change_counts_for_what_is_made_of_it(
    kernel_sources: Any, tree: Path, name: str, old: str, new: str
) -> None:
    before = kernels(kernel_sources, tree)
    assert old in FILES[name]
    write(tree, name, FILES[name].replace(old, new))
    assert changed(kernel_sources, tree, before) == {"norm", "everything"}


def test_passes_of_a_kernel_change_by_themselves(kernel_sources: Any, tree: Path) -> None:
    before = kernels(kernel_sources, tree)
    write(tree, "src/cuda/attention/sm80/backward/plain_bf16.cu", "int mma_backward() { return 2; }\n")
    assert changed(kernel_sources, tree, before) == {"attention mma backward", "everything"}


def test_declarations_are_told_apart(kernel_sources: Any) -> None:
    text = """#define SIZE 4  // of a tile
namespace a { inline namespace b {
template <int n> struct Row { int at[n] = {1, 2}; };  // two
int sum(int a) { if (a > 1'000) { return '}'; } return a; } constexpr int table[] = {1, {2}};
X::X() : a{1}, b{"}"} { run(); }
#if SIZE > 2
using A = B;
#endif
}}"""
    assert kernel_sources.declarations(text) == [
        "#define SIZE 4",
        "template < int n > struct Row { int at [ n ] = { 1 , 2 } ; } ;",
        "int sum ( int a ) { if ( a > 1'000 ) { return '}' ; } return a ; }",
        "constexpr int table [ ] = { 1 , { 2 } } ;",
        'X : : X ( ) : a { 1 } , b { "}" } { run ( ) ; }',
        "#if SIZE > 2",
        "using A = B ;",
        "#endif",
    ]


def test_every_source_is_part_of_a_kernel(kernel_sources: Any) -> None:
    sources = kernel_sources.sources_of(ROOT)
    known = set().union(*(kernel_sources.files_of(sources, units) for units in kernel_sources.UNITS.values()))
    of_cuda = {name for name in sources if name.startswith("src/cuda/")}
    assert sorted(name for name in of_cuda - known if not name.startswith(kernel_sources.HOST)) == []
    for name, units in kernel_sources.UNITS.items():
        for unit in units:
            assert kernel_sources.files_of(sources, [unit]), f"{name}: nothing is at {unit}"


def record(root: Path, suite: str, lines: list[dict[str, Any]], **environment: Any) -> Path:
    path = root / f"{suite}.jsonl"
    first = {"environment": {"date": "a day", "sources": "0" * 64, **environment}}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))
    return path


def line(op: str, impl: str, pas: str = "forward", dtype: str = "bf16") -> dict[str, Any]:
    return {"op": op, "impl": impl, "pass": pas, "dtype": dtype, "ms": 1.0}


RAN = [
    (line("attention", "mma"), {"attention mma forward"}),
    (line("attention", "mma", "backward"), {"attention mma backward"}),
    (line("attention", "mma", "backward", "f32"), {"attention mma f32 backward"}),
    (line("attention", "wgmma", dtype="f32"), {"attention wgmma f32 forward"}),
    (line("attention", "fused", dtype="f32"), {"attention fused forward"}),
    (line("attention", "tiled", "backward"), {"attention tiled"}),
    ({"op": "profile", "impl": "mma", "direction": "backward", "dtype": "bf16"}, {"attention mma backward"}),
    (line("attention", "torch flash"), set()),
    (line("rate", "gemm"), set()),
    ({**line("gemm", "split"), "skipped": "takes f32"}, set()),
    (line("gemm", "split"), {"gemm split"}),
    (line("norm", "tilewise"), {"norm"}),
    ({"op": "sweep"}, {"attention mma f32 forward"}),
    ({"finished": "a day"}, set()),
]


@pytest.mark.parametrize(("one", "expected"), RAN, ids=lambda x: str(x)[:60])
def test_a_line_says_what_ran(results_status: Any, one: dict[str, Any], expected: set[str]) -> None:
    assert results_status.ran(one, "mma-f32-sweep") == expected


def test_what_is_not_known_ran_everything(results_status: Any, kernel_sources: Any) -> None:
    assert results_status.ran({"suite": "call-cost", "call": 4.7}, "call-cost") == {
        *kernel_sources.UNITS,
        "everything",
    }
    assert results_status.ran(line("layer", "tilewise"), "layer") == {*kernel_sources.UNITS}
    found = results_status.ran(line("attention", "auto"), "vit")
    assert {"attention wgmma forward", "attention fused backward", "choice"} <= found
    assert not any(name.startswith("gemm") for name in found)


def test_a_record_is_current_until_what_it_ran_changes(
    results_status: Any, kernel_sources: Any, tree: Path
) -> None:
    now = kernels(kernel_sources, tree)
    path = record(tree, "norm", [line("norm", "tilewise")], kernels=now)
    assert results_status.status(path, now, "") == "current, from a day"
    other = {**now, "attention mma forward": "0"}
    assert results_status.status(path, other, "") == "current, from a day"
    older = "OLDER than the sources of norm, from a day"
    assert results_status.status(path, {**now, "norm": "0"}, "") == older
    assert results_status.status(path, {name: x for name, x in now.items() if name != "norm"}, "") == older


def test_records_of_tests_are_of_everything(results_status: Any, kernel_sources: Any, tree: Path) -> None:
    now, tests = kernels(kernel_sources, tree), results_status.tests_of(tree)
    path = record(tree, "tests", [{"suite": "cuda_test", "passed": 3, "failed": 0}], kernels=now, tests=tests)
    assert results_status.status(path, now, tests) == "current, from a day"
    (tree / "tests/cuda/norm/norm_test.cpp").rename(tree / "tests/cuda/moved_test.cpp")
    assert results_status.status(path, now, results_status.tests_of(tree)) == "current, from a day"
    write(tree, "tests/cuda/moved_test.cpp", "int test() { return 2; }\n")
    found = results_status.status(path, now, results_status.tests_of(tree))
    assert found == "OLDER than the tests, from a day"
    found = results_status.status(path, {**now, "everything": "0"}, tests)
    assert found == "OLDER than the sources of everything, from a day"
    found = results_status.status(path, {}, tests)
    assert found.startswith("OLDER than the sources of attention fused backward, ")
    assert found.endswith(f" and {len(now) - 4} more, from a day")


def test_records_say_what_they_lack(results_status: Any, tmp_path: Path) -> None:
    assert results_status.status(record(tmp_path, "old", []), {}, "") == "OLDER than the sources, from a day"
    (tmp_path / "none.jsonl").write_text('{"environment": {"cpu": "some"}}\n')
    without = "does not say which sources it was made from"
    assert results_status.status(tmp_path / "none.jsonl", {}, "") == without
    (tmp_path / "damaged.jsonl").write_text("{}\n")
    assert results_status.status(tmp_path / "damaged.jsonl", {}, "").startswith("not a record")
    last = [{"total": {"passed": 3, "failed": 2}}]
    found = results_status.status(record(tmp_path, "tests", last), {}, "")
    assert found == "OLDER than the sources, from a day, WITH 2 FAILED"


def test_a_renewed_record_keeps_what_it_measured(results_status: Any, tmp_path: Path) -> None:
    before = {"norm": "n0", "rope": "r0", "everything": "e0"}
    now = {"norm": "n1", "rope": "r1", "everything": "e1"}
    lines = [line("norm", "tilewise"), line("rope", "tilewise")]
    fresh = record(tmp_path, "fresh", lines, kernels=before)
    stale = record(tmp_path, "stale", lines, kernels={**before, "rope": "older"})
    text = fresh.read_text()
    assert results_status.renew([fresh, stale], before, now) == 2
    assert fresh.read_text() == text.replace("n0", "n1").replace("r0", "r1")
    assert results_status.status(fresh, now, "") == "current, from a day"
    assert results_status.status(stale, now, "") == "OLDER than the sources of rope, from a day"


def test_records_are_renewed_only_with_the_same_code(
    results_status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("kernels.json", "a.json", "b.json")]
    paths[0].write_text("{}")
    paths[1].write_text(json.dumps({"sm_90 kernel": ["1"]}))
    paths[2].write_text(json.dumps({"sm_90 kernel": ["2"]}))
    shutil.copytree(ROOT / "include", tmp_path / "include")
    monkeypatch.setattr(results_status, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results_status.py", "--renew", *map(str, paths)])
    assert results_status.main() == 1
    monkeypatch.setattr(
        sys, "argv", ["results_status.py", "--renew", str(paths[0]), str(paths[1]), str(paths[1])]
    )
    assert results_status.main() == 0
