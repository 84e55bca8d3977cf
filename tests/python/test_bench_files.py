"""Records and reports on disk: never half written, and refused in one line where they are wrong."""

from __future__ import annotations

import copy
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_rows
import pytest
from tilewise import cli
from tilewise.bench import files, lines, records, report, roofline, run, summary
from tilewise.bench.plots import all_files
from tilewise.bench.problem import BadInput

RESULTS = Path(__file__).parents[2] / "results"
ENVIRONMENT = {"cpu": "Example CPU", "threads": 2}


def writer(path: Path, fresh: bool = False) -> records.Writer:
    return records.Writer(path, ENVIRONMENT, ("cpu",), fresh)


def interrupted(path: Path) -> str:
    """A record of two rows and the beginning of a third."""
    bench_rows.write(path, bench_rows.rows()[:2], finished=False)
    with path.open("a") as file:
        file.write('{"suite": "ladder", "op": "atten')
    return path.read_text()


# Replaced as a whole or not at all


def fail(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_resumed_record_is_never_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "suite.jsonl"
    before = interrupted(path)
    resumed = records.Writer(path, bench_rows.ENVIRONMENT, (), fresh=False)
    assert resumed.resumed == 2 and path.read_text() == before  # untouched before there is something to add
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(BadInput, match=r"--out: cannot write .*: No space left on device"):
                resumed.add(bench_rows.row("simt", 1.0))
        assert path.read_text() == before
    assert [x.name for x in tmp_path.iterdir()] == ["suite.jsonl"]
    resumed.add(bench_rows.row("simt", 1.0))
    assert [line["impl"] for line in records.read(path).rows] == ["naive", "fused", "simt"]


def test_a_finished_record_stays_until_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench_rows.write(tmp_path / "suite.jsonl")
    before = path.read_text()
    anew = writer(path)
    assert path.read_text() == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(BadInput, match="No space left"):
            anew.add(bench_rows.row("simt", 1.0))
    assert path.read_text() == before


def test_a_record_cut_inside_a_letter_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    bench_rows.write(path, bench_rows.rows()[:1], finished=False)
    with path.open("ab") as file:
        file.write('{"suite": "é'.encode()[:-1])
    resumed = records.Writer(path, bench_rows.ENVIRONMENT, (), fresh=False)
    resumed.add(bench_rows.row("fused", 1.0))
    assert len(records.read(path).rows) == 2


def test_a_report_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, page = bench_rows.write(tmp_path / "a.jsonl"), tmp_path / "report.html"
    page.write_text("the old one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert cli.main(["report", str(record)]) == 2
    assert page.read_text() == "the old one"
    assert cli.main(["report", str(record)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.jsonl", "report.html"]


def test_what_stands_behind_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "there" / "page.html")
    (tmp_path / "there" / "page.html").write_text("old")
    files.replace(link, "new")
    assert link.is_symlink() and (tmp_path / "there" / "page.html").read_text() == "new"


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    """As `--out /dev/stdout` or a shell's `>(command)`: nothing is put in its place."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    files.check_writable("--out", pipe)
    files.replace(pipe, "a page")
    reader.join()
    assert read == ["a page"] and pipe.is_fifo()


def test_a_folder_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"records: cannot read {tmp_path}: Is a directory"):
        records.read(tmp_path)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text('[1, 2]\n{"finished": "2020-01-02"}\n')
    with pytest.raises(BadInput, match=rf"{path}, line 1: expected an object, got '?\[1, 2\]"):
        records.read(path)


# Found out before anything is measured


def in_the_way(folder: Path) -> Path:
    """A file where a folder would have to be."""
    (folder / "taken").write_text("")
    return folder / "taken" / "out"


def nowhere(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nothing")
    return folder / "link"


UNWRITABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file in the way": (in_the_way, "is not a folder"),
    "a link to nothing": (nowhere, "a broken link"),
    "a name too long": (lambda folder: folder / ("x" * 300), "File name too long"),
    "no name at all": (lambda folder: folder / "a\0b", "null"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_a_folder_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, why = UNWRITABLE[name]
    monkeypatch.setattr(run, "_run_suites", lambda *_: pytest.fail("measured first"))
    shape = ["bench", "--shape", "hq=2 sq=16 d=8", "--device", "cpu", "--out", str(make(tmp_path))]
    assert cli.main(shape) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilewise: --out: cannot write") and why in error and error.count("\n") == 1


def test_a_report_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilewise.bench.environment.slug", lambda _: "machine")
    monkeypatch.setattr(run, "_run_suites", lambda *_: pytest.fail("measured first"))
    (tmp_path / "machine" / "report.html").mkdir(parents=True)
    shape = ["bench", "--shape", "hq=2 sq=16 d=8", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(shape) == 2
    assert "report.html: it is a folder" in capsys.readouterr().err


def test_pictures_need_matplotlib_and_say_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("tilewise.bench.png.importlib.import_module", missing)
    record = bench_rows.write(tmp_path / "a.jsonl")
    assert cli.main(["report", str(record), "--plots", str(tmp_path / "plots"), "--png"]) == 2
    error = capsys.readouterr().err
    assert "--png: expected matplotlib" in error and "pip install matplotlib" in error
    assert not (tmp_path / "report.html").exists() and not (tmp_path / "plots").exists()


def test_records_of_an_installed_package_have_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.default_out() == Path("tilewise-bench")
    monkeypatch.chdir(Path(__file__).parents[2])
    assert cli.default_out() == Path("build/bench")


# What a page says is text, whatever a record says

SCRIPT = "<script>alert('&')</script>"


def test_no_field_of_a_record_is_markup(tmp_path: Path) -> None:
    changed = bench_rows.rows()
    for line in changed:
        line |= {"suite": SCRIPT, "dtype": SCRIPT, "features": SCRIPT, "impl": f"{line['impl']} {SCRIPT}"}
        line |= {"level": SCRIPT, "threads": 3, "device": SCRIPT, "skipped": SCRIPT}
    path = tmp_path / "a.jsonl"
    head = {"environment": {key: SCRIPT for key in (*bench_rows.ENVIRONMENT, SCRIPT)}}
    rate = {"op": "rate", "impl": "gemm", "dtype": SCRIPT, "tflops": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, rate, *changed)))
    found = records.read_all([path])
    drawings = [svg for record in summary.by_machine(found) for svg in all_files(record).values()]
    assert all("<script>alert" not in text for text in (report.page(found), *drawings))
    # The parts that reading would refuse are text even so.
    line = bench_rows.row("fused", 1.0) | {"pass": SCRIPT, "threads": SCRIPT, "level": "avx2"}
    assert "<script>alert" not in report.page([records.Record({}, [], [line])])


# Records that are not what they say

ODD: list[Any] = [
    *(None, "", SCRIPT, "nan", "\ud800", "\u2028", "x" * 1000, "forward", "f32", "attention", "rate", "cpu"),
    *(0, -1, 1, 2**70, 10**400, 1e308, -1e308, 5e-324, 1e-30, 0.5, True, False),
    *([], {}, [1], [1, 2], [None, None], {"a": 1}, {"1": 1}, {"x": 1}, {"1": "x"}),
]
FIELDS = ("environment", "finished", "pass", "impl", "op", "sizes", "level", "threads", "skipped", "ms")
BITS = ("", "NaN", "Infinity", "\n", "\0", "{", "[[" * 3000, '"', "\r\n", "é")


def sound_records() -> list[list[dict[str, Any]]]:
    """Hand-made ones and the beginnings of real ones."""
    found = [[{"environment": bench_rows.ENVIRONMENT}, *bench_rows.RATES, *bench_rows.rows()]]
    for path in sorted(RESULTS.glob("*/*.jsonl")):
        if path.stem in ("layer", "decode", "cpu", "mma-profile", "tf32"):
            found.append([json.loads(line) for line in path.read_text().splitlines()[:12]])
    return found


def mutated(draw: random.Random, sound: list[list[dict[str, Any]]]) -> bytes:
    source = draw.choice(sound)
    some = draw.sample(source[1:], min(len(source) - 1, draw.randint(1, 12)))
    given = copy.deepcopy([source[0], *some])[draw.random() < 0.1 :]
    for _ in range(draw.randint(1, 3)):
        place: Any = draw.choice(given)
        for inner in ("environment", "sizes"):
            if isinstance(place.get(inner), dict) and draw.random() < 0.6:
                place = place[inner]
        key = draw.choice([*place, *FIELDS])
        if draw.random() < 0.3:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(draw.choice(ODD))
    text = "".join(json.dumps(line) + "\n" for line in given)
    if draw.random() < 0.15:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(BITS) + text[at + draw.randint(0, 9) :]
    return text.encode()[: draw.randrange(len(text)) if draw.random() < 0.1 else None]


def test_a_record_is_drawn_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    draw, sound = random.Random(seed), sound_records()
    path, outcomes = tmp_path / "odd.jsonl", {"drawn": 0, "refused": 0}
    for _ in range(300):
        path.write_bytes(mutated(draw, sound))
        try:
            found = records.read_all([path])
            for text in (report.page(found), roofline.text(found), summary.text(summary.by_machine(found))):
                text.encode()
            outcomes["drawn"] += 1
        except BadInput as error:
            assert "odd.jsonl" in str(error) and "\n" not in str(error) and len(str(error)) < 400, error
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes  # the test itself is worth something


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("ms", "fast", "ms: expected a finite number, or null, got 'fast'"),
        ("ms", float("1e400"), "expected JSON"),  # what Python writes for it is none
        ("tflops", None, "tflops: expected a figure, as ms has one, got null"),
        ("pass", "sideways", "pass: expected one of forward, backward, both, got 'sideways'"),
        ("sq", -1, "sq: expected a whole number, 1 or above, got -1"),
        ("sq", True, "sq: expected a whole number, 1 or above, got true"),
        ("causal", 1, "causal: expected true or false, got 1"),
        ("dtype", 16, "dtype: expected text, got 16"),
        ("window", [1], r"window: expected \[left, right\], or null, got \[1\]"),
    ],
)
def test_a_wrong_field_is_named_with_file_and_line(
    tmp_path: Path, field: str, value: Any, expected: str
) -> None:
    wrong = bench_rows.row("fused", 1.0) | {field: value}
    path = bench_rows.write(tmp_path / "a.jsonl", [bench_rows.row("naive", 2.0), wrong])
    with pytest.raises(BadInput, match=rf"records: .*a\.jsonl, line 6: {expected}"):
        records.read(path)


def test_every_record_of_the_tree_is_what_it_has_to_be() -> None:
    found = [*RESULTS.glob("*/*.jsonl")]
    assert found and all(
        not lines.wrong_with(json.loads(line)) for path in found for line in path.read_text().splitlines()
    )
