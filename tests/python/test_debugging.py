"""What environment variables ask for: a log of calls, and a look at index tensors on a GPU. Each is read
once, so every test runs a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CALLS = """
import tilewise, torch
q = torch.randn(1, 2, 8, 16, requires_grad=True)
x = torch.randn(5, 16)
tilewise.attention(q, q, q, is_causal=True).sum().backward()
with torch.no_grad():
    tilewise.linear(x, torch.randn(7, 16))
    tilewise.ffn(x, torch.randn(32, 16), torch.randn(16, 32))
    tilewise.rms_norm(x, torch.ones(16))
    tilewise.layer_norm(x, torch.ones(16))
    tilewise.apply_rope(q, None, *tilewise.rope_tables(8, 16))
"""

# In order: what each line begins with after the time and the process.
OPERATIONS = [
    "attention forward f32 dense",
    "attention backward f32 dense",
    "gemm f32",
    "ffn forward f32",
    "rms norm forward f32",
    "layer norm forward f32",
    "rope f32",
]

CHECKED = """
import tilewise, torch
def message(device):
    q = torch.randn(9, 2, 16, device=device)
    ends = torch.tensor([0, 5, 3], dtype=torch.int32, device=device)
    try:
        tilewise.attention_varlen(q, q, q, ends, ends, 9, 9)
    except tilewise.InvalidArgument as error:
        return str(error)
    return "none"
print(message("cuda"), message("cpu"), sep="\\n")
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
        timeout=300,
    )


def assert_is_log(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) == len(OPERATIONS)
    for line, operation in zip(lines, OPERATIONS, strict=True):
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT[\d:.]+Z \d+ {operation} .* on cpu.*: \w+", line), line


def test_a_log_has_a_line_for_each_operation(tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    log.write_text("what was there\n")
    assert run(CALLS, TILEWISE_LOG=str(log)).stderr == ""
    first, _, rest = log.read_text().partition("\n")
    assert first == "what was there"
    assert_is_log(rest)


def test_a_log_may_go_to_standard_error() -> None:
    assert_is_log(run(CALLS, TILEWISE_LOG="-").stderr)


def test_a_log_that_cannot_be_opened_is_said_once(tmp_path: Path) -> None:
    errors = run(CALLS, TILEWISE_LOG=str(tmp_path / "nowhere" / "calls.log")).stderr
    assert re.fullmatch(r"tilewise: TILEWISE_LOG: cannot open '.*': .*; nothing is logged\n", errors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_check_says_of_a_gpu_tensor_what_the_cpu_says() -> None:
    checked, on_cpu = run(CHECKED, TILEWISE_CHECK="1").stdout.splitlines()
    assert checked == on_cpu == "cu_seqlens_q: expected entries that do not decrease, got 3 at index 2"
    unchecked, _ = run(CHECKED, TILEWISE_CHECK="0").stdout.splitlines()
    assert unchecked == "none"
