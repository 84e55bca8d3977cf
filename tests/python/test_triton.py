"""The kernel in Triton: its cases by the interpreter and on a GPU, and what is said where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tilewise
import torch
import triton_cases
from conftest import rows
from tilewise import _binding, _triton, attention

HERE = Path(__file__).resolve().parent
CASES = [name for name in vars(triton_cases) if name.startswith("test_")]
GROUPS = 4  # processes, each of which takes a minute

needs_triton = pytest.mark.skipif(not _triton.installed(), reason="triton is not installed")


# The cases, on a GPU


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("triton")
    return torch.device(request.param)


globals().update({name: getattr(triton_cases, name) for name in CASES})


# By the interpreter


def run(program: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """One thread: the interpreter runs programs one after another, on tensors that are tiny."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *program], cwd=HERE, env=variables, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize("group", range(GROUPS))
def test_the_cases_hold_by_the_interpreter(group: int) -> None:
    names = [f"triton_cases.py::{name}" for name in CASES[group::GROUPS]]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    result = run(["-m", "pytest", *options, *names], TRITON_INTERPRET="1")
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


# As compiled code, for GPUs that are not here

COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tilewise._binding import DEFAULTS, INDEX
from tilewise._triton import launch

backend, architecture, warp, shared_memory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, warp)

class Elsewhere:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: target)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

def compile(kernel, programs, device, *arguments, **settings):
    compiled = kernel.warmup(*arguments, grid=(programs,), **settings)
    print("compiled", kernel.__name__, compiled.metadata.shared)
    assert compiled.metadata.shared <= shared_memory, kernel.__name__

driver.set_active(Elsewhere())
launch.launch = compile

def both_passes(q, k, v, needed, **options):
    arguments = [q, k, v, *DEFAULTS[3:]]
    for name, value in options.items():
        arguments[INDEX[name]] = value
    out, lse = launch.forward(arguments)
    launch.backward(out, lse, out, lse, needed, arguments)

q, k, v = (torch.zeros(1, heads, 64, 128, dtype=torch.float16) for heads in (2, 1, 1))
seed = torch.zeros(2, dtype=torch.int64)
both_passes(
    q, k, v, [True] * 5, is_causal=True, window_left=5, softcap=3.0, alibi_slopes=torch.zeros(2),
    sinks=torch.zeros(2), attn_mask=torch.zeros(64, 64), dropout_p=0.1, dropout_seed=seed,
)
q, k, v = (torch.zeros(1, heads, 64, 80) for heads in (2, 1, 1))
both_passes(q, k, v, [True, True, True, False, False])
"""


@needs_triton
@pytest.mark.parametrize(
    "target",
    [("hip", "gfx942", "64", "65536"), ("cuda", "80", "32", "166912")],
    ids=["AMD MI300", "NVIDIA A100"],
)
def test_every_kernel_compiles_and_fits(target: tuple[str, ...], tmp_path: Path) -> None:
    result = run(["-c", COMPILE, *target], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0 and result.stdout.count("compiled") == 9, result.stdout + result.stderr


# Where it cannot run


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if Triton were installed, and its interpreter not asked for."""
    monkeypatch.setattr(_triton, "installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield


@pytest.mark.usefixtures("without_triton")
def test_without_triton_the_error_says_what_to_install() -> None:
    q, k, v = rows()
    needs = "needs the package triton, which is not installed: pip install triton"
    with pytest.raises(tilewise.Unsupported, match=f"^kernel: kernel 'triton' {needs}$"):
        attention(q, k, v, enable_gqa=True, kernel="triton")
    text = tilewise.explain(q, k, v, enable_gqa=True, kernel="triton")
    assert f"  triton: cannot: {needs}\n" in text and "chosen" not in text


@pytest.mark.usefixtures("without_interpreter")
def test_on_a_cpu_it_is_refused_and_nothing_else_runs_instead() -> None:
    q, k, v = rows()
    with pytest.raises(tilewise.Unsupported, match=r"^kernel: kernel 'triton' runs on GPUs"):
        attention(q, k, v, enable_gqa=True, kernel="triton")
    text = tilewise.explain(q, k, v, enable_gqa=True)
    assert text.count("  triton: cannot: runs on GPUs") == 2 and text.count("simd: chosen") == 2


def test_importing_tilewise_does_not_import_triton() -> None:
    program = "import sys, tilewise; print('tilewise._triton.kernels' in sys.modules)"
    result = run(["-c", program])
    assert result.stdout.strip() == "False", result.stdout + result.stderr


def test_the_list_of_kernels_has_it_after_the_librarys_own_for_gpus() -> None:
    names = tilewise.kernels()
    assert names[-3:] == ["triton", "simd", "reference"]
    assert [x for x in names if x != "triton"] == _binding.attention_kernels()
    assert tilewise.nn.Attention(8, 2, kernel="triton").kernel == "triton"
    with pytest.raises(tilewise.InvalidArgument, match=r"^kernel: expected one of auto, .*triton, simd"):
        attention(*rows(), enable_gqa=True, kernel="tritium")


@pytest.mark.usefixtures("without_interpreter")
def test_shapes_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach().to("meta") for x in rows())
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, kernel="triton")
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and lse.dtype == torch.float32
    wide = [x.double() for x in (q, k, v)]
    with pytest.raises(tilewise.Unsupported, match=r"^query: kernel 'triton' needs f32, f16 or bf16"):
        attention(*wide, enable_gqa=True, kernel="triton")


# What "auto" takes


def test_auto_takes_it_where_no_other_kernel_has_code(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, xpu = (torch.device(name) for name in ("cpu", "cuda:0", "xpu:0"))
    assert not _triton.alone_on(cpu) and _triton.alone_on(xpu)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert _triton.alone_on(cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    for able in (False, True):
        monkeypatch.setattr(_triton, "_some_kernel_is_able", lambda index, able=able: able)
        assert _triton.alone_on(cuda) is not able


@pytest.mark.usefixtures("without_interpreter")
def test_explain_of_a_device_that_the_library_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, which stands for the other device here."""
    monkeypatch.setattr(_triton, "refusal", lambda arguments: None)
    monkeypatch.setattr(_triton, "is_foreign", lambda device: True)
    q, k, v = (x.detach() for x in rows())
    head, *lines = tilewise.explain(q, k, v, enable_gqa=True, is_causal=True).splitlines()
    assert head == "forward f32 dense B2 Hq6 Hkv2 Sq37 Sk53 D40 Dv24 on cpu, causal"
    assert [line.partition(":")[0].strip() for line in lines] == tilewise.kernels()
    for line in lines:
        assert line == "  triton: chosen" or line.endswith(": cannot: does not run on cpu"), line
