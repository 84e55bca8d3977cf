"""For the site: examples of docstrings (>>> and what follows) become blocks of code.

Markdown would take >>> for quotations, and lines of a mask's picture that begin with # for headings.
mkdocs.yml names this file as an extension of Griffe, which reads the docstrings.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)  # up to the next empty line


def fenced(text: str) -> str:
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Examples(Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
