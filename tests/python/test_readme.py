"""The Python snippets of README and of the guides run as they stand there, and no snippet is left out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OTHERS = ("transformers", "timm", "vit_pytorch")  # packages that some snippets need


def pages() -> list[str]:
    """README, the guides and the lab notes; none in a staged tree."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if path.exists()]


def snippets(page: str, wanted: str = "python") -> list[str]:
    return [text for language, text in BLOCKS.findall((ROOT / page).read_text()) if language == wanted]


SNIPPETS = [(page, number) for page in pages() for number in range(len(snippets(page)))]


def fences() -> list[tuple[str, str, str]]:
    """(page, language, text) of every block of code in README and the guides."""
    if not pages():
        pytest.skip("a staged tree has no pages")
    return [(page, *found) for page in pages() for found in BLOCKS.findall((ROOT / page).read_text())]


def test_every_python_block_is_run_or_says_that_it_is_a_fragment() -> None:
    found = {language for _, language, _ in fences() if language.startswith("py")}
    assert found and found <= {"python", "python fragment"}
    assert SNIPPETS


def test_every_cpp_block_is_a_program_or_says_that_it_is_a_fragment() -> None:
    """tests/CMakeLists.txt compiles and runs the programs of the pages it names."""
    compiled = re.findall(
        r"^test_snippets\((\S+) ", (ROOT / "tests/CMakeLists.txt").read_text(), re.MULTILINE
    )
    found = [fence for fence in fences() if fence[1].startswith(("cpp", "c++"))]
    assert found
    for page, language, text in found:
        if language != "cpp fragment":
            assert language == "cpp" and "int main(" in text, f"{page}: no program:\n{text}"
            assert page in compiled, f"{page}: no test_snippets in tests/CMakeLists.txt"


@pytest.mark.parametrize(("page", "number"), SNIPPETS)
def test_snippet_runs(page: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = snippets(page)[number]
    for package in OTHERS:
        if re.search(rf"^(from|import) {package}\b", snippet, re.MULTILINE):
            pytest.importorskip(package, exc_type=Exception)
    monkeypatch.chdir(ROOT)  # snippets name the examples' folders from there
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    exec(compile(snippet, f"{page} snippet {number}", "exec"), {})
    for name in set(sys.modules) - before:
        if "examples" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]  # examples have modules of the same names
