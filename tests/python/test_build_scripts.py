"""What builds Tilewise: cmake/ and scripts/, as far as they can be tried in seconds."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "scripts/test.py").exists(), reason="a staged tree has none")


def configure(folder: Path, project: str, *options: str, **environment: str) -> str:
    """What CMake says when it configures `project`, the text of a CMakeLists.txt."""
    cmake = shutil.which("cmake")
    assert cmake, "no cmake on PATH"
    (folder / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.25)\n{project}\n")
    (folder / "kernel.cpp").write_text("int kernel() { return 0; }\n")
    done = subprocess.run(
        [cmake, "-G", "Ninja", "-S", folder, "-B", folder / "build", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("cache", ["", "/usr/bin/env"])
def test_hopper_kernels_compile_with_and_without_a_compiler_cache(tmp_path: Path, cache: str) -> None:
    said = configure(
        tmp_path,
        f"""
project(kernels LANGUAGES CXX)
include({ROOT}/cmake/TilewiseTarget.cmake)
add_library(kernels OBJECT kernel.cpp)
tilewise_hopper_target(kernels)
get_target_property(launcher kernels CUDA_COMPILER_LAUNCHER)
message(STATUS "launcher=${{launcher}}")""",
        f"-DCMAKE_CUDA_COMPILER_LAUNCHER={cache}",
    )
    launcher = said.partition("launcher=")[2].splitlines()[0].split(";")
    compiled = subprocess.run([*launcher, "sh", "-c", "echo compiled"], capture_output=True, text=True)
    assert (compiled.returncode, compiled.stdout) == (0, "compiled\n"), (launcher, compiled.stderr)


def test_a_compiler_cache_that_is_not_on_path_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere/ccache"
    cache.parent.mkdir()
    cache.touch(mode=0o755)

    def launcher(path: str) -> str:
        said = configure(
            tmp_path,
            f"""
project(defaults LANGUAGES NONE)
include({ROOT}/cmake/TilewiseDefaults.cmake)
message(STATUS "launcher=${{CMAKE_CXX_COMPILER_LAUNCHER}}.")""",
            "--fresh",
            f"-DCMAKE_SYSTEM_PROGRAM_PATH={cache.parent}",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            PATH=path,
        )
        return said.partition("launcher=")[2].partition(".")[0]

    assert launcher(path=str(tmp_path)) == ""
    assert launcher(path=str(cache.parent)) == str(cache)


def test_cmake_3_25_finds_a_toolkit_without_nvtoolsext(tmp_path: Path) -> None:
    # As its FindCUDAToolkit.cmake does, in a subdirectory too.
    module = 'set_property(TARGET CUDA::nvToolsExt PROPERTY DEPRECATION "superseded by nvtx3")'
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/CMakeLists.txt").write_text(
        f"if(CMAKE_VERSION VERSION_LESS 3.26)\n{module}\nendif()\n"
    )
    configure(
        tmp_path,
        f"""
project(parts LANGUAGES NONE)
set(TILEWISE_CUDA OFF)
include({ROOT}/cmake/TilewiseParts.cmake)
add_subdirectory(inner)""",
    )


@pytest.mark.parametrize(
    ("report", "status"),
    [
        ("ptxas info    : Used 168 registers", 0),
        ("ptxas info    : (C7519) Potential Performance Loss: a fence was added", 0),
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma instructions are serialized", 1),
        ("    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads", 1),
    ],
)
def test_ptxas_may_not_give_up_what_a_kernel_was_written_for(report: str, status: int) -> None:
    checked = [ROOT / "cmake/check_ptxas.sh", "sh", "-c", 'echo "$0" >&2', report]
    assert subprocess.run(checked, capture_output=True).returncode == status


def test_a_failed_compilation_fails_with_its_own_status() -> None:
    checked = [ROOT / "cmake/check_ptxas.sh", "sh", "-c", "exit 7"]
    assert subprocess.run(checked).returncode == 7


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nothing_runs_after_a_failed_build_and_its_errors_are_said_last(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script(tmp_path / "scripts/lint.sh", "exit 0")
    script(
        tmp_path / "scripts/build.sh",
        """echo "$1" >> built
echo '[1/3] Building CXX object a.cpp.o'
echo '[2/3] Building CXX object b.cpp.o'
echo 'FAILED: b.cpp.o '
echo 'b.cpp:7:1: error: expected a type' >&2
echo 'ninja: build stopped: subcommand failed.'
exit 1""",
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts/test.py", "lint", "release", "python", "asan"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (tmp_path / "built").read_text() == "release\n"
    assert "pytest" not in done.stdout
    assert done.stdout.splitlines()[-4:] == [
        "FAILED   release: build",
        "         FAILED: b.cpp.o",
        "         b.cpp:7:1: error: expected a type",
        "1 passed, 1 failed",
    ]
    assert "ninja: build stopped" in done.stdout


# Locking a mutex twice: no signal brings C back from there.
DEADLOCK = "import ctypes; lock = ctypes.PyDLL(None).pthread_mutex_lock; m = bytes(64); lock(m); lock(m)"


@pytest.mark.parametrize(
    ("hang", "said"), [("while True: pass", "1 failed, 1 passed"), (DEADLOCK, "Timeout (")]
)
def test_a_test_that_hangs_is_named_and_ends(tmp_path: Path, hang: str, said: str) -> None:
    if not importlib.util.find_spec("pytest_timeout"):
        pytest.skip("no pytest-timeout")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_hang.py").write_text(f"def test_a():\n    {hang}\n\ndef test_b():\n    pass\n")
    settings = ("-o", "timeout=1", "-o", "faulthandler_timeout=3", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "test_hang.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "in test_a" in done.stderr or "test_hang.py::test_a" in done.stdout


class BareSystem:
    """scripts/setup.sh where nothing is installed: with commands that every system has, and an apt-get that
    only notes what it was asked for."""

    TOOLS = "bash cat cut dirname env expand flock grep head printf sed sh sha256sum sort true"

    def __init__(self, folder: Path, user: int, sudo: bool) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        self.asked.touch()
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        (folder / "bin").mkdir()
        for tool in self.TOOLS.split():
            (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
        script(folder / "bin/id", f"echo {user}")
        for program in ("apt-get", "dpkg"):
            script(folder / "bin" / program, f'echo {program} "$@" >>{self.asked}')
        if sudo:
            script(folder / "bin/sudo", '[ "$1" != -n ] || shift\nexec "$@"')

    def set_up(self, terminal: str | None = None, **environment: str) -> str:
        """What set-up says; `terminal`: what is typed at one. It always fails: nothing gets installed."""
        leader, follower = pty.openpty()
        if terminal:
            os.write(leader, terminal.encode())
        with subprocess.Popen(
            [self.folder / "scripts/setup.sh", "library"],
            env={"PATH": str(self.folder / "bin")} | environment,
            stdin=follower if terminal else subprocess.DEVNULL,
            stdout=follower,
            stderr=follower,
        ) as process:
            assert process.wait(timeout=60) == 1
        os.close(follower)
        said = b""
        with contextlib.suppress(OSError):  # which is a terminal's end of file
            while part := os.read(leader, 65536):
                said += part
        os.close(leader)
        return said.decode().replace("\r\n", "\n")


LIBRARY_PACKAGES = "cmake ninja-build g++ libhwy-dev"
INSTALLED = (
    "dpkg --configure -a\napt-get update\n"
    f"apt-get install -y --no-install-recommends {LIBRARY_PACKAGES} -o DPkg::Lock::Timeout=300\n"
)


@pytest.mark.parametrize(
    ("user", "sudo", "terminal", "agreed", "installs"),
    [
        (0, False, None, "", True),
        (0, False, "n\n", "", False),
        (0, False, "y\n", "", True),
        (1000, True, None, "", False),
        (1000, True, None, "1", True),
        (1000, True, "\n", "", False),
        (1000, True, "y\n", "", True),
        (1000, False, "y\n", "", False),
        (1000, False, None, "1", False),
    ],
)
def test_set_up_changes_the_system_only_where_that_was_agreed_to(
    tmp_path: Path, user: int, sudo: bool, terminal: str | None, agreed: str, installs: bool
) -> None:
    system = BareSystem(tmp_path, user, sudo)
    said = system.set_up(terminal, TILEWISE_YES=agreed)
    as_root = "sudo " if user else ""
    command = f"apt-get install -y --no-install-recommends {LIBRARY_PACKAGES}"
    assert f"\n    {as_root}apt-get update && {as_root}{command}\n" in said
    assert re.search(r"^  cmake +configures the build$", said, re.MULTILINE)
    assert system.asked.read_text() == (INSTALLED if installs else "")
    assert ("Installed, but still not found" in said) == installs


@pytest.mark.parametrize(
    ("name", "targets"),
    [("test", {"test"}), ("wheel", {"hub"}), ("weekly", {"tsan", "coverage", "races"}), ("site", {"docs"})],
)
def test_workflows_agree_to_what_set_up_installs(name: str, targets: set[str]) -> None:
    """Without a terminal it refuses a user other than root who has not agreed."""
    import yaml  # not on a GPU machine

    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    rules = dict(re.findall(r"^([a-z-]+): *([a-z -]*)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set()
    for job in workflow["jobs"].values():
        commands = [step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")]
        for command in commands:
            words = job["strategy"]["matrix"]["target"] if "matrix" in command else [command.split()[1]]
            made.update(words)
            for word in words:
                needed = set(rules[word].split())
                sets_up = "setup" in needed or any("setup" in rules[other] for other in needed & set(rules))
                assert not sets_up or job["env"]["TILEWISE_YES"] == 1, (name, word)
    assert made == targets


def test_every_pinned_file_has_a_hash() -> None:
    for name in ("torch", "cuda", "dev", "models", "wheel", "coverage"):
        text = (ROOT / f"scripts/requirements-{name}.txt").read_text()
        packages = re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]
        assert packages, name
        assert [
            package for package in packages if not re.match(r"\S+==\S+.*\\\n +--hash=sha256:", package)
        ] == []


@pytest.mark.parametrize("command", ["test", "bench", "install"])
def test_a_command_says_beforehand_what_it_does_and_how_long_that_takes(tmp_path: Path, command: str) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    said = subprocess.run(
        [tmp_path / "scripts/about.sh", command], capture_output=True, text=True, check=True
    ).stdout
    minutes = [int(found) for found in re.findall(r"^ +(\d+) min  \w", said, re.MULTILINE)]
    assert said.startswith(f"make {command} is going to\n")
    assert f"\nThat is about {sum(minutes)} min on two cores" in said
    assert all(minute > 0 for minute in minutes)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "bare", raising=False)
    return importlib.import_module("bare")


def test_bare_machines_need_root_and_say_so(bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(bare.Unable, match="needs root"):
        bare.check_able(["no"])


def test_bare_machines_refuse_unknown_steps(
    bare: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bare", "--steps", "test,fly"])
    with pytest.raises(SystemExit):
        bare.parse_options()
    assert "--steps: expected some of install, test, bench, pip, got fly" in capsys.readouterr().err


def test_bare_machines_reach_what_pip_reaches_here(
    bare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheels, certificate = tmp_path / "wheels", tmp_path / "certificate.crt"
    index = tmp_path / "index/simple"
    for folder in (wheels, index):
        folder.mkdir(parents=True)
    certificate.write_text("trust")
    settings = {
        "global.find-links": str(wheels),
        "global.extra-index-url": f"https://somewhere/simple file://{index}",
        "global.cert": str(certificate),
    }
    monkeypatch.setattr(bare, "pip_settings", lambda: settings)
    monkeypatch.setattr(
        bare, "call", lambda *command: 'Acquire::http::Proxy "http://proxy:1";\nAPT::Other "1";\n'
    )
    shown: list[str] = []
    monkeypatch.setattr(bare.Machine, "show", lambda self, folder: shown.append(folder))
    machine = bare.Machine(tmp_path / "machine", tmp_path / "log")
    (machine.folder / "etc/apt/apt.conf.d").mkdir(parents=True)
    bare.connect(machine)
    assert (machine.folder / "etc/pip.conf").read_text() == (
        f"[global]\nfind-links = {wheels}\nextra-index-url = https://somewhere/simple file://{index}\n"
        "cert = /etc/bare/certificate.crt\n"
    )
    assert (machine.folder / "etc/bare/certificate.crt").read_text() == "trust"
    assert shown == [str(wheels), str(index.parent)]
    assert (
        machine.folder / "etc/apt/apt.conf.d/99bare"
    ).read_text() == 'Acquire::http::Proxy "http://proxy:1";\n'
