"""The command `tilewise`: what it leaves and prints, and bad input in one line that names the option."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tilewise
import torch
from tilewise import _binding, cli
from tilewise.bench import (
    check,
    environment,
    exact,
    files,
    implementations,
    kinds,
    measure,
    rates,
    records,
    suites,
)
from tilewise.bench.operations import OPERATIONS
from tilewise.bench.problem import BadInput

pytestmark = pytest.mark.usefixtures("quick_rates")
QUERY = torch.ones(1, 1, 4, 8)


def test_bench_writes_records_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: torch.device
) -> None:
    shape = ["bench", "--shape", "hq=2 sq=16 d=8", "--seconds", "0"]
    arguments = [*shape, "--out", str(tmp_path), "--device", device.type]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "times as fast as the fastest peer" in printed and "report" in printed
    (page,) = tmp_path.glob("*/report.html")
    assert "Tilewise on" in page.read_text()
    (written,) = tmp_path.glob("*/shape.jsonl")
    command = str(records.read(written).environment["command"])
    assert command == shlex.join(["tilewise", *arguments]) and "--shape 'hq=2 sq=16 d=8'" in command
    assert f"Measured by <code>{html.escape(command)}</code>." in page.read_text()
    assert cli.main(["roofline", str(tmp_path)]) == 0
    assert "bound by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--suite", "nothing"], "--suite: expected a file"),
        (["bench", "--shape", "hq=1"], "--shape: expected at least"),
        (
            ["bench", "--shape", "hq=1 sq=4 d=8", "--dtype", "f8"],
            "--dtype: expected f32, f16, bf16, got 'f8'",
        ),
        (["bench", "--shape", "hq=1 sq=4 d=8", "--pass", "up"], "--pass: expected forward, backward, both"),
        (
            ["bench", "--kernels", "quick"],
            "--kernels: expected names, or parts of names, among reference, simd",
        ),
        (["bench", "--runs", "3"], "--runs: expected 20 or more, got 3"),
        (["bench", "--threads", "0"], "--threads: expected 1 or more, got 0"),
        (["bench", "--threads", str(10**12)], "--threads: expected a number of threads, got 1000000000000"),
        (["bench", "--suite", "x" * 5000], "--suite: expected a file"),
        (
            ["explain", "--shape", "hq=1 sq=999999999 d=999999999"],
            "--shape: cannot make the tensors of h1 s999",
        ),
        (["explain", "--shape", f"hq=1 sq={10**30} d=8"], "--shape: sq: expected at most 281474976710656"),
        (["bench", "--shape", f"op=gemm m={10**30} n=1 k=1"], "--shape: m: expected at most 281474976710656"),
        (["bench", "--seconds", "nan"], "--seconds: expected 0 or more, got nan"),
        (["bench", "--seconds", "inf"], "--seconds: expected 0 or more, got inf"),
        (["bench", "--limit-ms", "nan"], "--limit-ms: expected 0 or more, got nan"),
        (["bench", "--within", "nan"], "--within: expected 0 or more, got nan"),
        (
            ["check", "--shape", "hq=1 sq=999999999 d=999999999", "--device", "cpu"],
            "--shape: cannot make the",
        ),
        (
            ["explain", "--shape", "op=gemm m=1 n=1 k=1"],
            "--shape: expected attention, the one operation expl",
        ),
        (
            ["profile", "--shape", "op=rope heads=1 length=2 dim=8", "--pass", "backward", "--device", "cpu"],
            "--pass: expected a pass of this operation, got 'backward'",
        ),
        (["report", "nowhere"], "records: expected a file or folder, got 'nowhere'"),
        (["report", ".", "--png"], "--png: expected --plots as well"),
        (["explain", "--call", "nowhere"], "--call: cannot read nowhere"),
        (["profile", "--kernel", "nothing", "--device", "cpu"], "--kernel: expected one of reference"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_bad_input_is_one_line_that_names_the_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available() or "--device" in arguments or arguments[0] != "bench":
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (
            tilewise.InvalidArgument("query: expected rank 4, got rank 1"),
            1,
            "tilewise: query: expected rank 4",
        ),
        (measure.DeviceLost("the GPU is gone"), 1, "tilewise: the GPU is gone\n"),
        (BadInput("--shape: expected one"), 2, "tilewise: --shape: expected one\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["error", "lost device", "bad input", "Ctrl-C"],
)
def test_the_status_says_how_a_command_ended(
    raised: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(measured: bool) -> str:
        raise raised

    monkeypatch.setattr(cli, "info", fail)
    assert cli.main(["info"]) == status
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == bool(said)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["bench --list --device cpu", "--version", "info"])
def test_a_reader_that_had_enough_is_no_error(arguments: str, unbuffered: str) -> None:
    """As `tilewise bench --list | head -1`: status 0 and no word."""
    # The reader is gone before the first line. Short outputs are still in the buffer when the command ends.
    command = f"{shlex.quote(sys.executable)} -m tilewise {arguments}"
    done = subprocess.run(
        ["bash", "-c", f"{{ sleep 0.5; {command}; }} | true; echo ${{PIPESTATUS[0]}}"],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n" and done.stderr == ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"query": 1, "key": 2, "value": 3}, "query: expected Tensor, got int"),
        ({"query": QUERY, "key": QUERY, "value": QUERY, "colour": 1}, "unexpected keyword argument 'colour'"),
        ({"query": QUERY, "key": QUERY, "value": QUERY, 3: 1}, "keywords must be strings"),
    ],
    ids=["no tensors", "no argument", "no name"],
)
def test_a_saved_call_that_is_none_is_one_line(
    call: dict[Any, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(call, tmp_path / "call.pt")
    assert cli.main(["explain", "--call", str(tmp_path / "call.pt")]) == 2
    error = capsys.readouterr().err
    assert "--call: " in error and message in error and error.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/below", "file/below/it"])
def test_a_folder_that_cannot_be_is_said_before_anything_is_measured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(rates, "measure", lambda *given: pytest.fail("measured"))
    shape = ["bench", "--shape", "hq=2 sq=16 d=8", "--device", "cpu"]
    assert cli.main([*shape, "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert "--out: cannot write" in error and f"{tmp_path / 'file'} is not a folder" in error
    assert error.count("\n") == 1 and (tmp_path / "file").read_text() == "no folder"


def test_a_folder_without_permission_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = [
        "bench",
        "--shape",
        "hq=2 sq=16 d=8",
        "--seconds",
        "0",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:  # root may write anywhere, so the system's answer is replaced
        patch.setattr(files.tempfile, "TemporaryFile", refuse)
        assert cli.main(shape) == 2
    error = capsys.readouterr().err
    assert f"no permission in {tmp_path}" in error and error.count("\n") == 1

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    assert cli.main(shape) == 2
    error = capsys.readouterr().err
    assert "--out: cannot write" in error and "No space left on device" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x", "mps"])
def test_a_device_that_is_none_is_said(name: str) -> None:
    with pytest.raises(BadInput, match=f"--device: expected cpu or cuda, got '{name}'"):
        environment.choose_device(name)


def test_missing_gpu_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "--device: expected an available device, got cuda" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert environment.choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(BadInput, match="--device: expected one of 2 GPUs, got cuda:2"):
        environment.choose_device("cuda:2")


def test_the_list_has_every_suite_and_who_takes_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list", "--device", "cpu"]) == 0
    listed, present = capsys.readouterr().out.split("\non cpu\n")
    assert [line.split()[0] for line in listed.splitlines()] == suites.names()
    for name in suites.names():
        assert f"{name} " in listed and f" {len(suites.load(name).problems)} problems " in listed
    words = {line.split()[0]: line for line in present.splitlines() if line.strip()}
    for op in ("attention", *OPERATIONS):
        names = words[op].split(maxsplit=1)[1].split(", ")
        assert {name.startswith("torch ") for name in names} == {True, False}, names


def test_info_lists_kernels_and_simd(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "simd  " in printed and "kernels on cpu" in printed
    assert re.search(r"^  reference +usable$", printed, re.MULTILINE)
    if _binding.cuda_code():
        assert "cuda      machine code for " in printed and "wgmma 9.0a" in printed
    else:
        assert "cuda      none: this build has no CUDA kernels\n" in printed


def test_long_names_of_kernels_are_apart_from_what_is_said_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = {"name_of_sixteen_": "runs on CUDA devices only", "simd": "usable"}
    monkeypatch.setattr(implementations, "kernels_on", lambda device: verdicts)
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out.partition("kernels on ")[2].splitlines()[1:3]
    assert said == ["  name_of_sixteen_  runs on CUDA devices only", "  simd              usable"]

    kernel = kinds.taking_part("attention", torch.device("cpu"))[0]
    monkeypatch.setattr(check, "ours", lambda *_: [replace(kernel, name="name_of_sixteen_")])
    assert cli.main(["check", "--shape", "hq=2 sq=30 d=16", "--dtype", "f32", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[20:26] for line in lines[1:3]] == ["result", "o     "]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (["80"], ["machine code for 8.0; PTX for 8.0", "mma 8.0 and newer", "wgmma not built"]),
        (["75-real"], ["machine code for 7.5", "fused 7.5 and newer", "mma not built", "wgmma not built"]),
        (["native", "90a-real"], ["machine code for native, 9.0a", "mma native", "wgmma 9.0a"]),
        (
            ["100-real", "90a-real"],
            ["machine code for 10.0, 9.0a", "fused 10.0 and newer", "mma 10.0 and newer"],
        ),
    ],
)
def test_info_says_for_which_gpus_kernels_were_built(code: list[str], expected: list[str]) -> None:
    first, attention, products = environment.cuda_build(code, ["wgmma", "mma", "fused", "simd", "reference"])
    assert first == expected[0] and all(words in attention for words in expected[1:])
    assert attention.startswith("attention: wgmma ") and "simd" not in attention
    assert products.startswith("products: simt ")


def test_explain_takes_options_and_saved_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["explain", "--shape", "hq=4 hkv=2 sq=16 d=8", "--causal", "yes", "--device", "cpu"]
    assert cli.main([*shape, "--gradient"]) == 0
    printed = capsys.readouterr().out
    assert "forward f32 dense B1 Hq4 Hkv2 Sq16" in printed and "causal" in printed and "backward" in printed
    x = torch.randn(1, 2, 6, 8)
    torch.save({"query": x, "key": x, "value": x, "window": (2, 0)}, tmp_path / "call.pt")
    assert cli.main(["explain", "--call", str(tmp_path / "call.pt")]) == 0
    assert "Sq6" in capsys.readouterr().out


def test_check_has_an_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["check", "--shape", "hq=2 sq=30 d=16", "--dtype", "f32", "--device", "cpu"]
    assert cli.main(arguments) == 0
    assert "8 results, 0 with more" in capsys.readouterr().out
    monkeypatch.setattr(exact, "within_contract", lambda *_: False)
    assert cli.main(arguments) == 1
    assert "MORE than twice" in capsys.readouterr().out
