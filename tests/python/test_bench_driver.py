"""The GPU as its driver describes it, by a stand-in for the driver's library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from tilewise.bench import driver

ATTRIBUTES = {16: 132, 13: 1_980_000, 75: 9, 76: 0}  # multiprocessors, clock in kHz, compute capability


class Library:
    """A driver with one GPU. `refused` is a function that answers with error 3."""

    def __init__(self, gpus: int = 1, refused: str = "") -> None:
        self.gpus, self.refused = gpus, refused

    def __getattr__(self, function: str) -> Any:
        answers: dict[str, Any] = {
            "cuDeviceGetCount": lambda: self.gpus,
            "cuDeviceGet": lambda number: number,
            "cuDeviceGetAttribute": lambda attribute, device: ATTRIBUTES[attribute],
            "cuDriverGetVersion": lambda: 12080,
            "cuDeviceTotalMem_v2": lambda device: 143771 << 20,
        }

        def call(*arguments: Any) -> int:
            if function == self.refused:
                return 3
            if function == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200 (80 GB)"
            elif function != "cuInit":
                arguments[0]._obj.value = answers[function](*arguments[1:])
            return 0

        return call


def use(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(driver, "driver_version", lambda: "570.1")


def test_a_gpu_is_described_as_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Library(), monkeypatch)
    gpu = driver.find_gpu()
    assert gpu == driver.Gpu("NVIDIA H200 (80 GB)", "9.0", 132, 1980.0, 143771, "570.1", "12.8")
    assert gpu.slug == "nvidia-h200-80-gb"


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (Library(refused="cuInit"), "the NVIDIA driver answers cuInit with error 3"),
        (Library(refused="cuDeviceGet"), "the NVIDIA driver answers cuDeviceGet with error 3"),
        (Library(gpus=0), "the NVIDIA driver knows no GPU"),
    ],
    ids=["cuInit", "cuDeviceGet", "no GPU"],
)
def test_a_driver_without_a_gpu_says_why(
    library: Library, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(library, monkeypatch)
    with pytest.raises(driver.NoGpu, match=reason):
        driver.find_gpu()


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(driver.NoGpu, match=r"no NVIDIA driver \(libcuda.so.1\)"):
        driver.find_gpu()


@pytest.mark.parametrize(
    ("program", "kernel_module", "version"),
    [
        ("echo 570.124.06", None, "570.124.06"),
        ("exit 9", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue", "550.54.15"),
        ("true", "NVRM version: none", "unknown"),
        ("exit 9", None, "unknown"),
    ],
    ids=["nvidia-smi", "kernel module", "no number", "neither"],
)
def test_the_drivers_version_comes_from_nvidia_smi_or_the_kernel(
    program: str, kernel_module: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def read(path: Path) -> str:
        assert str(path) == "/proc/driver/nvidia/version"
        if kernel_module is None:
            raise FileNotFoundError(path)
        return kernel_module

    monkeypatch.setattr(Path, "read_text", read)
    assert driver.driver_version() == version
