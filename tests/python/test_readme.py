"""The Python snippets of README and of the guides run as they stand there, and no snippet is left out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "docs/distributed.md", "docs/hugging_face.md", "docs/layer.md"),
    *("docs/models.md", "docs/pytorch.md", "docs/text_models.md"),
)
OTHERS = ("transformers", "timm", "vit_pytorch")  # packages that some snippets need


def snippets(page: str) -> list[str]:
    path = ROOT / page
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL) if path.exists() else []


SNIPPETS = [(page, number) for page in PAGES for number in range(len(snippets(page)))]


def fences() -> list[tuple[str, str, str]]:
    """(page, language, text) of every block of code in README and the guides."""
    pages = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]
    if not pages:
        pytest.skip("a staged tree has no pages")
    blocks = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [
        (path.relative_to(ROOT).as_posix(), *found)
        for path in pages
        for found in blocks.findall(path.read_text())
    ]


def test_every_page_with_python_is_run() -> None:
    assert {page for page, language, _ in fences() if language.startswith("py")} == set(PAGES)
    assert {language for _, language, _ in fences() if language.startswith("py")} == {"python"}


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
