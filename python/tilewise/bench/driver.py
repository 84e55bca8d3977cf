"""The GPU as its driver describes it, through ctypes: neither torch nor nvidia-smi is needed."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NoGpu(Exception):
    """Why there is no GPU to work on."""


@dataclass
class Gpu:
    name: str
    compute_capability: str
    multiprocessors: int
    clock_mhz: float  # the highest of the multiprocessors
    memory_mb: int
    driver: str
    driver_cuda: str  # newest CUDA the driver knows

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def find_gpu() -> Gpu:
    """The first GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpu("no NVIDIA driver (libcuda.so.1)") from error

    def ask(function: str, kind: Any, *arguments: Any) -> Any:
        value = kind()
        status = getattr(driver, function)(ctypes.byref(value), *arguments)
        if status != 0:
            raise NoGpu(f"the NVIDIA driver answers {function} with error {status}")
        return value.value

    if status := driver.cuInit(0):
        raise NoGpu(f"the NVIDIA driver answers cuInit with error {status}")
    if ask("cuDeviceGetCount", ctypes.c_int) == 0:
        raise NoGpu("the NVIDIA driver knows no GPU")
    device = ask("cuDeviceGet", ctypes.c_int, 0)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    # Numbers of CUdevice_attribute in cuda.h.
    multiprocessors, clock_khz, major, minor = (
        ask("cuDeviceGetAttribute", ctypes.c_int, attribute, device) for attribute in (16, 13, 75, 76)
    )
    newest = ask("cuDriverGetVersion", ctypes.c_int)
    return Gpu(
        name=name.value.decode(),
        compute_capability=f"{major}.{minor}",
        multiprocessors=multiprocessors,
        clock_mhz=clock_khz / 1000,
        memory_mb=ask("cuDeviceTotalMem_v2", ctypes.c_size_t, device) >> 20,
        driver=driver_version(),
        driver_cuda=f"{newest // 1000}.{newest % 1000 // 10}",
    )


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return output.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"
