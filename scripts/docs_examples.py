"""For the site: how docstrings are read. mkdocs.yml names this file as an extension of Griffe.

Examples (>>> and what follows) become blocks of code: Markdown would take >>> for quotations, and lines of a
mask's picture that begin with # for headings. Arguments that share a line get one each, with their own type
and default.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)  # up to the next empty line
ARGUMENTS = re.compile(r"^Args:\n(?: +.*\n?|\n)+", re.MULTILINE)
SHARED = re.compile(r"^ {4}(\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def fenced(text: str) -> str:
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


def one_by_one(text: str) -> str:
    """
    >>> one_by_one("Args:\\n    k, v: keys,\\n        and values.\\n    n: how many.")
    'Args:\\n    k: keys,\\n        and values.\\n    v: keys,\\n        and values.\\n    n: how many.'
    """

    def each(found: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {found[2]}" for name in found[1].split(", "))

    return ARGUMENTS.sub(lambda section: SHARED.sub(each, section[0]), text)


class Examples(Extension):
    """Puts a fence around every example, and arguments on lines of their own."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(one_by_one(obj.docstring.value))
