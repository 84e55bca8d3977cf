"""`tilewise tune`: what is timed, written, read again and ignored.

Kernels of the CPU have one configuration, so the questions are made up here. The CUDA kernels have real ones
(tests/cuda/attention/tuning_test.cpp).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tilewise
from tilewise import _binding, cli
from tilewise.bench import tune

ROW = {"device": "a GPU", "table": "t", "problem": "f32 m=4", "row": "dim=64"}
LINE = "a GPU\tt\tf32 m=4\t0\tdim=64\tdim=128"


@pytest.fixture(autouse=True)
def no_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TILEWISE_TUNING", raising=False)
    tune.use(None)
    yield
    monkeypatch.undo()
    tune.use(None)


def default_file(tmp_path: Path) -> Path:
    return tmp_path / "tilewise" / "tuning.json"


def contents(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"format": "tilewise tuning", "version": 1, "choices": list(choices)}


def test_nothing_is_written_where_there_is_no_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--shape", "hq=1 sq=8 d=8", "--dtype", "f32", "--pass", "forward", "--causal", "no"]
    assert cli.main(["tune", "--device", "cpu", *shape]) == 0
    printed = capsys.readouterr().out
    assert "[1/1] h1 s8 d8 f32 forward" in printed and "nothing to choose" in printed
    assert "nothing was written" in printed and not default_file(tmp_path).exists()


def test_the_default_shapes_are_not_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would take minutes, and a kernel of the CPU has one configuration."""
    assert cli.main(["tune", "--device", "cpu"]) == 0
    assert "is for GPUs" in capsys.readouterr().out and not default_file(tmp_path).exists()


def test_the_fastest_row_is_written_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_binding, "tuning_end", lambda: [LINE])
    taken: list[str] = []

    def race(entrants: dict[str, Any], *_: object) -> dict[str, tune.timing.Timing]:
        for entrant in entrants.values():
            with entrant.scope():
                (choice,) = tune.status().choices
                taken.append(choice["row"])
                entrant.calls[0]()
        return {"0": tune.timing.Timing(2.0, 0.0, 20), "1": tune.timing.Timing(1.0, 0.0, 20)}

    monkeypatch.setattr(tune.timing, "race", race)
    shape = ["--shape", "hq=1 sq=8 d=8", "--dtype", "f32", "--pass", "forward", "--causal", "no"]
    assert cli.main(["tune", "--device", "cpu", *shape]) == 0
    assert taken == ["dim=64", "dim=128"]
    printed = capsys.readouterr().out
    assert "2000.0 us  dim=64  <- default" in printed and "1000.0 us  dim=128  <- taken" in printed
    written = json.loads(default_file(tmp_path).read_text())
    assert written == contents(ROW | {"row": "dim=128", "microseconds": 1000, "default_microseconds": 2000})
    tune.use(None)
    assert tune.status().from_file and tune.status().choices == written["choices"]
    assert f"tuning    {default_file(tmp_path)}, 1 choice measured on a GPU" in cli.info()
    # Another run adds to the file or, with --fresh, begins it anew.
    monkeypatch.setattr(_binding, "tuning_end", lambda: [LINE.replace("m=4", "m=8")])
    monkeypatch.setattr(
        tune.timing, "race", lambda entrants, *_: {x: tune.timing.Timing(1, 0, 20) for x in "01"}
    )
    assert cli.main(["tune", "--device", "cpu", *shape]) == 0
    assert [x["row"] for x in json.loads(default_file(tmp_path).read_text())["choices"]] == [
        "dim=128",
        "dim=64",
    ]
    assert cli.main(["tune", "--device", "cpu", "--fresh", *shape]) == 0
    assert [x["problem"] for x in json.loads(default_file(tmp_path).read_text())["choices"]] == ["f32 m=8"]
    # A file elsewhere says how to use it.
    elsewhere = tmp_path / "elsewhere.json"
    assert cli.main(["tune", "--device", "cpu", "--out", str(elsewhere), *shape]) == 0
    assert f"TILEWISE_TUNING={elsewhere}" in capsys.readouterr().out and elsewhere.exists()


def test_the_default_row_stays_in_noise() -> None:
    question = tune.Question.read(LINE)
    for ms, best in ((1.995, 0), (1.9, 1), (2.1, 0)):
        times = (tune.timing.Timing(2.0, 0.0, 20), tune.timing.Timing(ms, 0.0, 20))
        assert tune.Answer(question, times).best == best


def test_wrong_contents_are_an_error_and_change_nothing() -> None:
    tune.use(contents(ROW))
    for wrong in ({}, {"format": "tilewise tuning", "version": 2}, contents({"device": "x"})):
        with pytest.raises(tilewise.InvalidArgument, match="tuning: expected"):
            tune.use(wrong)
    assert [choice["row"] for choice in tune.status().choices] == ["dim=64"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1}', "is ignored: tuning: expected"),
        ("", "is ignored: tuning: expected JSON"),
        (json.dumps(contents(ROW)), "1 choice measured on a GPU"),
        (None, "is ignored: tuning: expected a file that can be read"),
    ],
)
def test_info_says_what_is_in_use(
    text: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("TILEWISE_TUNING", str(path))
    tune.use(None)
    assert f"tuning    {path}" in cli.info() and said in cli.info()
    warned = capfd.readouterr().err
    assert warned.count("\n") == ("ignored" in said), warned
    monkeypatch.setenv("TILEWISE_TUNING", "off")
    tune.use(None)
    assert "tuning    off" in cli.info()


def test_a_process_reads_the_file_once_and_needs_none(tmp_path: Path) -> None:
    program = (
        "import tilewise, torch; x = torch.ones(1, 1, 2, 8); print(tilewise.attention(x, x, x).sum().item())"
    )
    for text in (None, "garbage"):
        if text is not None:
            default_file(tmp_path).parent.mkdir()
            default_file(tmp_path).write_text(text)
        run = subprocess.run(
            [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, check=True
        )
        assert float(run.stdout) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "3"], "--runs: expected 20 or more, got 3"),
        (["--shape", "hq=1"], "--shape: expected at least"),
        (["--out", "/proc/x/y"], "--out: cannot write"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_off_needs_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TILEWISE_TUNING", "off")
    tune.use(None)
    assert cli.main(["tune", "--device", "cpu", "--shape", "hq=1 sq=8 d=8"]) == 2
    assert "--out: expected a file" in capsys.readouterr().err
