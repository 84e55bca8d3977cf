"""Plots as PNG: what is given to matplotlib, which need not be installed, and which files are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_rows
import pytest
from tilewise.bench import charts, plots, png, records, summary


class Axis:
    """What a chart draws: lines by their labels, scales, ticks and titles."""

    def __init__(self) -> None:
        self.lines: dict[str, list[tuple[float, float]]] = {}
        self.rules: list[list[tuple[float, float]]] = []
        self.markers: dict[str, str] = {}
        self.scales: dict[str, str] = {}
        self.ticks: dict[str, tuple[list[float], list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.xaxis = SimpleNamespace(set_ticks=self._ticks("x"))
        self.yaxis = SimpleNamespace(set_ticks=self._ticks("y"))
        self.title = SimpleNamespace(set_fontsize=lambda _: None)

    def _ticks(self, name: str) -> Callable[..., None]:
        def set_ticks(at: list[float], texts: list[str] | None = None, minor: bool = False) -> None:
            if minor:
                assert list(at) == []
            else:
                self.ticks[name] = (list(at), list(texts or []))

        return set_ticks

    def plot(self, xs: Any, ys: Any, line: str, label: str | None = None, **style: Any) -> None:
        points = list(zip(xs, ys, strict=True))
        if label is None:
            assert line == ":"
            self.rules.append(points)
        else:
            self.lines[label] = points
            self.markers[label] = style["marker"]

    def set_xscale(self, kind: str) -> None:
        self.scales["x"] = kind

    def set_yscale(self, kind: str) -> None:
        self.scales["y"] = kind

    def set(self, **texts: str) -> None:
        self.texts = texts

    def grid(self, *_: Any, **__: Any) -> None: ...

    def legend(self, **_: Any) -> None: ...


class Pyplot:
    """Keeps what was drawn into each file, and which figures are still open."""

    def __init__(self) -> None:
        self.files: dict[Path, Axis] = {}
        self.open: list[Any] = []

    def subplots(self, **_: Any) -> tuple[Any, Axis]:
        axis = Axis()

        def save(path: Path) -> None:
            path.write_bytes(b"")
            self.files[path] = axis

        figure = SimpleNamespace(tight_layout=lambda: None, savefig=save)
        self.open.append(figure)
        return figure, axis

    def close(self, figure: Any) -> None:
        self.open.remove(figure)


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Pyplot:
    found = Pyplot()
    used: list[str] = []
    modules = {"matplotlib": SimpleNamespace(use=used.append), "matplotlib.pyplot": found}
    monkeypatch.setattr("tilewise.bench.png.importlib.import_module", modules.__getitem__)
    assert png.check() is found and used == ["agg"]  # agg needs no screen
    return found


def test_every_plot_has_a_file_with_its_points(pyplot: Pyplot, tmp_path: Path) -> None:
    record = records.read(bench_rows.write(tmp_path / "record.jsonl"))
    of = summary.races(record.rows)
    png.write_all(record, tmp_path)
    expected = [c for group in plots.growths(of) for metric in plots.METRICS if (c := group.chart(metric))]
    expected += plots.roofline(record, of)
    if chart := plots.exactness(of):
        expected.append(chart)
    assert expected and len(pyplot.files) == len(expected) == len(list(tmp_path.glob("*.png")))
    assert not pyplot.open
    drawn = {axis.texts["title"] + axis.texts["ylabel"]: axis for axis in pyplot.files.values()}
    for chart in expected:
        axis = drawn[chart.title + chart.y.label]
        assert axis.texts["xlabel"] == chart.x.label
        assert axis.lines == {series.name: list(series.points) for series in chart.series}
        assert axis.rules == [list(rule) for _, rule in chart.rules]
        assert axis.scales == {n: "log" for n, of in (("x", chart.x), ("y", chart.y)) if of.log}
        assert axis.ticks["x"] == (list(chart.x.ticks), [charts.tick_text(x) for x in chart.x.ticks])


def test_file_names_say_what_is_plotted(pyplot: Pyplot, tmp_path: Path) -> None:
    png.write_all(records.read(bench_rows.write(tmp_path / "record.jsonl")), tmp_path)
    names = {path.name for path in pyplot.files}
    assert "error.png" in names
    assert any(name.startswith("roofline-") for name in names)
    assert all("--" not in name and " " not in name for name in names)


def test_implementations_are_told_apart_by_their_markers(pyplot: Pyplot, tmp_path: Path) -> None:
    png.write_all(records.read(bench_rows.write(tmp_path / "record.jsonl")), tmp_path)
    for axis in pyplot.files.values():
        for name, marker in axis.markers.items():
            assert marker == png._MARKERS[charts.style(name)[2]]
