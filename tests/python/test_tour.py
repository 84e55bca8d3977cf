"""examples/tour.ipynb runs from top to bottom, and its stored outputs belong to its cells.

Cells are executed here, in one namespace, as a notebook does: no Jupyter is needed for that.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from programs import EXAMPLES, load

TOUR = EXAMPLES / "tour.ipynb"
if not TOUR.exists():
    pytest.skip("a staged tree has no examples", allow_module_level=True)
CELLS = json.loads(TOUR.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def notebook() -> ModuleType:
    return load("scripts/notebook.py")


def stored(kind: str) -> list[str]:
    """The stored results of a kind, in order."""
    data = [output.get("data", {}) for cell in CODE for output in cell["outputs"]]
    return ["".join(found[kind]) for found in data if kind in found]


def test_stored_outputs_belong_to_the_cells(notebook: ModuleType) -> None:
    assert len(CODE) >= 6
    for number, cell in enumerate(CODE, start=1):
        assert cell["execution_count"] == number
        changed = "the cell has changed since its outputs were stored: run scripts/notebook.py"
        assert cell["metadata"] == {"digest": notebook.digest(cell)}, f"cell {number}: {changed}"
        assert all(output["output_type"] != "error" for output in cell["outputs"])


def test_stored_outputs_show_tables_and_plots() -> None:
    tables, plots = stored("text/html"), stored("image/svg+xml")
    assert len(tables) == 3 and all(table.startswith("<table>") for table in tables)
    assert "<td>simd</td>" in tables[0]
    assert len(plots) == 2 and all("<svg" in plot for plot in plots)


def test_it_says_how_to_install_and_opens_in_colab() -> None:
    assert "colab-badge.svg" in "".join(CELLS[0]["source"])
    assert '"pip", "install"' in "".join(CODE[0]["source"])


def test_it_runs_from_top_to_bottom(notebook: ModuleType) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed, pictures, tables = "", [], 0
    for number, cell in enumerate(CODE, start=1):
        name = f"tour.ipynb, code cell {number}"
        for output in notebook.outputs("".join(cell["source"]), name, number, namespace):
            printed += "".join(output.get("text", []))
            data = output.get("data", {})
            pictures += ["".join(data["image/svg+xml"])] if "image/svg+xml" in data else []
            tables += "text/html" in data
    assert tables == 3 and len(pictures) == 2
    for picture in pictures:
        assert "<svg" in picture and picture.count('<path class="line"') == 4  # two, and the legend's
        assert ">Tilewise</text>" in picture and ">SDPA</text>" in picture
    assert "chosen" in printed and "in place of torch's function" in printed
