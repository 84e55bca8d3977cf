"""README's Python snippets run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if README.exists() else []


def test_readme_has_snippets() -> None:
    if not README.exists():
        pytest.skip("a staged tree has no README")
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number: int) -> None:
    snippet = SNIPPETS[number]
    if "transformers import" in snippet:
        pytest.importorskip("transformers")
    exec(compile(snippet, f"README.md snippet {number}", "exec"), {})
