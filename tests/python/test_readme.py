"""The Python snippets of README and of the guides run as they stand there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/layer.md", "docs/models.md")
OTHERS = ("transformers", "timm", "vit_pytorch")  # packages that some snippets need


def snippets(page: str) -> list[str]:
    path = ROOT / page
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL) if path.exists() else []


SNIPPETS = [(page, number) for page in PAGES for number in range(len(snippets(page)))]


def test_pages_have_snippets() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("a staged tree has no pages")
    assert len(snippets("README.md")) >= 3 and all(snippets(page) for page in PAGES)


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
