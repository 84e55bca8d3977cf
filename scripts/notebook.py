"""Runs a notebook from top to bottom and stores its outputs: python scripts/notebook.py [examples/tour.ipynb]

The package must be importable. Jupyter is not needed: the cells are Python and run in one namespace. What
they print and the value of their last line are stored as Jupyter stores them. Each cell also stores a digest
of its source, by which a test sees that the stored outputs belong to the stored cells.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

SHOWN = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
ROOT = Path(__file__).resolve().parents[1]


def digest(cell: dict[str, Any]) -> str:
    return hashlib.sha256("".join(cell["source"]).encode()).hexdigest()[:16]


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def outputs(source: str, name: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """What Jupyter would store of a cell: the text that it printed, and its last value."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        value = run_cell(source, name, namespace)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None:
        data = {kind: lines(getattr(value, how)()) for kind, how in SHOWN.items() if hasattr(value, how)}
        shown = f"<{type(value).__name__}>" if data else repr(value)  # an address would differ each time
        data["text/plain"] = [shown]
        result = {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        found.append(result)
    return found


def execute(notebook: dict[str, Any], name: str) -> None:
    """Runs every code cell and puts its outputs, number and digest into it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        print(f"cell {number} of {len(code)}", file=sys.stderr)
        cell["outputs"] = outputs("".join(cell["source"]), f"{name}, code cell {number}", number, namespace)
        cell["execution_count"] = number
        cell["metadata"] = {"digest": digest(cell)}


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "examples" / "tour.ipynb").resolve()
    notebook = json.loads(path.read_text())
    os.chdir(path.parent)  # as Jupyter does
    execute(notebook, path.name)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
