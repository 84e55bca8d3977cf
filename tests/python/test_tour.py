"""examples/tour.ipynb runs from top to bottom, and is stored without outputs.

Cells are executed here, in one namespace, as a notebook does: no Jupyter is needed for that.
"""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from programs import EXAMPLES

TOUR = EXAMPLES / "tour.ipynb"
if not TOUR.exists():
    pytest.skip("a staged tree has no examples", allow_module_level=True)
CELLS = json.loads(TOUR.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def shown(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None


def test_it_is_stored_without_outputs() -> None:
    assert len(CODE) >= 6
    for cell in CODE:
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert not any("execution" in cell["metadata"] for cell in CELLS)


def test_it_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    pictures = []
    for number, cell in enumerate(CODE):
        value = shown("".join(cell["source"]), f"tour.ipynb, code cell {number}", namespace)
        if hasattr(value, "_repr_svg_"):
            pictures.append(value._repr_svg_())
    assert len(pictures) == 1
    assert "<svg" in pictures[0] and pictures[0].count('<path class="line"') == 4  # two, and the legend's
    assert ">Tilewise</text>" in pictures[0] and ">SDPA</text>" in pictures[0]
    printed = capsys.readouterr().out
    assert "chosen" in printed and "in place of torch's function" in printed
