"""Tries what users do first on machines where nobody ever installed anything: minimal Debians in a folder.

Each variant unpacks a fresh minimal Debian (debootstrap), clones the commit that is checked out here, and
runs there what the steps name. CUDA comes from this machine's toolkit, mounted read-only. Packages come from
where this machine's apt and pip have theirs. The ordinary user has no sudo: the command that set-up prints is
run by root, everything else by the user. Debians and logs are under build/bare.

Needs root and debootstrap; mounts are in a namespace of their own and end with the process.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/bare"
INSIDE = "TILEWISE_BARE_NAMESPACE"  # set for the process that has its own mounts
USER = "somebody"
FIRST_PACKAGES = "make,git"  # what it takes to clone and to say make; all else is set-up's to bring
LAST_LINES = 40  # of a log, shown where a step fails

STEPS = {
    "install": """
make install PREFIX="$HOME/prefix"
[ ! -e .venv ] # a C++ library needs no PyTorch
[ -z "$(find "$HOME/prefix" -name '*_tilewise*')" ]
cmake -S examples/cpp -B "$HOME/consumer" -G Ninja -D CMAKE_PREFIX_PATH="$HOME/prefix"
cmake --build "$HOME/consumer"
"$HOME/consumer/example"
"$HOME/consumer/layer"
""",
    "test": """
make test | tee "$HOME/test.log"
tail -n 1 "$HOME/test.log" | grep -E '^[1-9][0-9]* passed, 0 failed$'
""",
    "bench": """
make bench ARGS="--shape 'hq=4 sq=512 d=64' --seconds 0.1"
""",
    "pip": """
scripts/setup.sh
python3 -m venv "$HOME/venv"
"$HOME/venv/bin/pip" install "$(grep -o '^torch==[0-9.]*' scripts/requirements-torch.txt)" numpy
"$HOME/venv/bin/pip" install .
cd /
"$HOME/venv/bin/python" - <<'END'
import torch, tilewise
q, k, v = (torch.randn(1, 4, 100, 64) for _ in range(3))
out = tilewise.attention(q, k, v, is_causal=True)
print(tilewise.__file__, tilewise.explain(q, k, v, is_causal=True), sep="\\n")
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
END
""",
}


@dataclass(frozen=True)
class Minutes:
    """By the clock, and of all processors together: on a busy machine the clock says little."""

    clock: float
    cpu: float

    @staticmethod
    def now() -> Minutes:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Minutes(time.monotonic() / 60, (used.ru_utime + used.ru_stime) / 60)

    def __sub__(self, other: Minutes) -> Minutes:
        return Minutes(self.clock - other.clock, self.cpu - other.cpu)

    def __str__(self) -> str:
        return f"{self.clock:6.1f} min, {self.cpu:6.1f} CPU"


class Unable(Exception):
    """Why nothing can be tried here."""


@dataclass(frozen=True)
class Variant:
    release: str
    cuda: bool
    root: bool

    def __str__(self) -> str:
        return f"{self.release}, {'with' if self.cuda else 'without'} CUDA, {'root' if self.root else 'user'}"

    @property
    def file_name(self) -> str:
        return f"{self.release}-{'cuda' if self.cuda else 'cpu'}-{'root' if self.root else 'user'}"


@dataclass
class Machine:
    """A minimal Debian in a folder, and what is mounted into it."""

    folder: Path
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=lambda: ["/usr/local/bin", "/usr/bin", "/usr/sbin"])

    def run(self, script: str, user: str = "root") -> tuple[bool, str]:
        """Whether bash ran the script without an error, in the clone where there is one, and what it said."""
        home = "/root" if user == "root" else f"/home/{user}"
        variables = {"HOME": home, "USER": user, "LANG": "C.UTF-8", "PATH": ":".join(self.path)}
        variables |= self.environment
        text = f"cd {home}/tilewise 2>/dev/null || cd {home}\nset -x\n{script}"
        with self.log.open("a") as log:
            begin = self.log.stat().st_size
            command = ["chroot", f"--userspec={user}:{user}", str(self.folder), "env", "-i"]
            command += [f"{name}={value}" for name, value in variables.items()]
            done = subprocess.run(
                [*command, "bash", "-euo", "pipefail", "-c", text],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        with self.log.open("rb") as log_bytes:
            log_bytes.seek(begin)
            return done.returncode == 0, log_bytes.read().decode(errors="replace")

    def mount(self, path: str, *options: str, source: str = "none") -> None:
        target = self.folder / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        call("mount", *options, source, str(target))

    def show(self, folder: str) -> None:
        """Makes a folder of this machine visible under the same name, read-only."""
        self.mount(folder, "--bind", source=folder)
        call("mount", "-o", "remount,bind,ro", str(self.folder / folder.lstrip("/")))

    def unmount(self) -> None:
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for path in reversed(mounted):
            if Path(path).is_relative_to(self.folder):
                call("umount", "--lazy", path)


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unable(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def toolkit() -> str:
    """The folder of the CUDA toolkit on this machine, or nothing."""
    if not shutil.which("nvcc"):
        return ""
    command = ["nvcc", "--dryrun", "-x", "cu", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", said.stderr, re.MULTILINE)
    return str(Path(top[1]).resolve()) if top else ""


def mirror() -> list[str]:
    """The archive that apt uses here; nothing where this is not a Debian, since debootstrap has a default."""
    system = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE))
    codename = system.get("VERSION_CODENAME")
    if system.get("ID") != "debian" or not codename:
        return []
    sources = Path("/etc/apt")
    for file in (sources / "sources.list", *sorted(sources.glob("sources.list.d/*.sources"))):
        text = file.read_text() if file.exists() else ""
        for stanza in re.split(r"\n\s*\n", text):
            uri = re.search(r"^URIs:\s*(\S+)", stanza, re.MULTILINE)
            if uri and re.search(rf"^Suites:.*\b{codename}(\s|$)", stanza, re.MULTILINE):
                return [uri[1]]
        line = re.search(rf"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+{codename}\s", text, re.MULTILINE)
        if line:
            return [line[1]]
    return []


@contextmanager
def locked(name: str) -> Iterator[None]:
    with (WORK / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unable(f"another run of make bare is at {name}; please wait for it") from error
        yield


def base(release: str) -> Path:
    """A minimal Debian, packed; made where it is not there yet."""
    packed = WORK / f"{release}.tar"
    if packed.exists():
        return packed
    with locked(release):
        print(f"Making {packed.relative_to(ROOT)}: a few minutes, once", flush=True)
        folder = WORK / f"{release}-base"
        call("rm", "-rf", "--one-file-system", str(folder))
        options = ["--variant=minbase", f"--include={FIRST_PACKAGES}"]
        call("debootstrap", *options, release, str(folder), *mirror())
        call("tar", "-C", str(folder), "--one-file-system", "-cf", f"{packed}.part", ".")
        Path(f"{packed}.part").rename(packed)
        call("rm", "-rf", "--one-file-system", str(folder))
    return packed


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine, from files and environment, such as "global.find-links"."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(r"^([\w:.-]+)='(.*)'$", listed, re.MULTILINE)
    return {name.replace(":env:", "global"): value for name, value in found}


def connect(machine: Machine) -> None:
    """Lets apt and pip in there reach what they reach here: names, certificates, proxies, settings."""
    for name in ("/etc/resolv.conf", "/etc/hosts"):
        if Path(name).exists():
            shutil.copyfile(name, machine.folder / name.lstrip("/"))
    carried = machine.folder / "etc/bare"  # apart from what packages own and write
    carried.mkdir()

    def there(word: str) -> str:
        """The word as it is said in there: a file of this machine is carried along."""
        if not Path(word).is_absolute() or not Path(word).is_file():
            return word
        shutil.copyfile(word, carried / Path(word).name)
        return f"/etc/bare/{Path(word).name}"

    for name, value in os.environ.items():
        if re.fullmatch(r"(?i)(https?|ftp|all|no)_proxy|ssl_cert_file|(requests|curl)_ca_bundle", name):
            machine.environment[name] = there(value)
    reaching = re.compile(r'Acquire::(?:https?::|Check-Valid-Until|Retries).*"(.*)";')
    found = [(line, reaching.match(line)) for line in call("apt-config", "dump").splitlines()]
    lines = [line.replace(match[1], there(match[1])) for line, match in found if match and match[1]]
    (machine.folder / "etc/apt/apt.conf.d/99bare").write_text("\n".join(lines) + "\n")
    settings: dict[str, list[str]] = {}
    for name, value in pip_settings().items():
        section, key = name.split(".", 1)
        settings.setdefault(section, []).append(f"{key} = {' '.join(map(there, value.split()))}")
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.is_dir():
                # The files of an index lie beside its lists.
                machine.show(str(path.parent if "index" in key else path))
    text = "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in settings.items())
    (machine.folder / "etc/pip.conf").write_text(text)


@contextmanager
def bare_machine(variant: Variant, python: str) -> Iterator[Machine]:
    """An unpacked Debian with a clone of this commit, gone afterwards."""
    folder = WORK / variant.file_name
    machine = Machine(folder, WORK / f"{variant.file_name}.log")
    machine.log.write_text("")
    packed = base(variant.release)
    call("rm", "-rf", "--one-file-system", str(folder))
    folder.mkdir(parents=True)
    try:
        call("tar", "-C", str(folder), "-xpf", str(packed))
        machine.mount("/proc", "-t", "proc")
        machine.mount("/sys", "-t", "sysfs", "-o", "ro")
        machine.mount("/dev/shm", "-t", "tmpfs")
        machine.mount("/dev/pts", "-t", "devpts", "-o", "ptmxmode=666,mode=620")
        connect(machine)
        if variant.cuda:
            machine.show(toolkit())
            machine.path.append(f"{toolkit()}/bin")
        if python:
            machine.show(python)
            machine.path.insert(0, f"{python}/bin")
            # It needs libraries of the system, which Debian's own needs, too.
            machine.run("apt-get update && apt-get install -y --no-install-recommends python3")
        user = "root" if variant.root else USER
        if not variant.root:
            call("chroot", str(folder), "useradd", "--create-home", "--shell", "/bin/bash", USER)
        clone = folder / ("root" if variant.root else f"home/{USER}") / "tilewise"
        call("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
        call("chroot", str(folder), "chown", "-R", f"{user}:{user}", f"/{clone.relative_to(folder)}")
        yield machine
    finally:
        machine.unmount()
        call("rm", "-rf", "--one-file-system", str(folder))


def install_as_told(machine: Machine, what: str) -> tuple[bool, str]:
    """Set-up as a user must fail and print a command; root runs it."""
    passed, said = machine.run(f"scripts/setup.sh {what}", USER)
    command = re.search(r"^ {4}sudo (apt-get update && )sudo (apt-get install .*)$", said, re.MULTILINE)
    if passed or not command:
        return False, "set-up as a user did not print the command for the packages"
    return machine.run(command[1] + command[2])


def try_variant(variant: Variant, steps: list[str], python: str) -> dict[str, tuple[bool, Minutes]]:
    """For each step whether it passed, and its minutes."""
    results: dict[str, tuple[bool, Minutes]] = {}
    print(f"\n{variant} (log: {(WORK / variant.file_name).relative_to(ROOT)}.log)", flush=True)
    with locked(variant.file_name), bare_machine(variant, python) as machine:
        user = "root" if variant.root else USER
        todo: dict[str, Callable[[], tuple[bool, str]]] = {}
        if not variant.root:
            todo["packages"] = partial(install_as_told, machine, "library" if steps == ["install"] else "")
        todo |= {step: partial(machine.run, STEPS[step], user) for step in steps}
        for step, run in todo.items():
            before = Minutes.now()
            passed, said = run()
            minutes = Minutes.now() - before
            results[step] = passed, minutes
            print(f"  {step:<10}{minutes}  {'passed' if passed else 'FAILED'}", flush=True)
            if not passed:
                print("\n".join(f"    | {line}" for line in said.splitlines()[-LAST_LINES:]), flush=True)
    return results


def cell(passed: bool, minutes: Minutes) -> str:
    return f"{minutes.clock:.0f} ({minutes.cpu:.0f})" + ("" if passed else " FAILED")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options = {"release": "bookworm,trixie", "cuda": "no,yes", "user": "root,user", "steps": ",".join(STEPS)}
    for name, default in options.items():
        parser.add_argument(f"--{name}", default=default, help=f"by comma (default: {default})")
    parser.add_argument(
        "--python",
        default="",
        metavar="FOLDER",
        help="mount this Python and use it in place of Debian's (FOLDER/bin/python3)",
    )
    chosen = parser.parse_args()
    for name, known in (("cuda", ["no", "yes"]), ("user", ["root", "user"]), ("steps", list(STEPS))):
        words = getattr(chosen, name).split(",")
        if unknown := set(words) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        setattr(chosen, name, words)
    if chosen.python and not Path(chosen.python, "bin/python3").exists():
        parser.error(f"--python: {chosen.python}/bin/python3 is not there")
    chosen.release = chosen.release.split(",")
    chosen.steps.sort(key=list(STEPS).index)  # the first needs the least
    return chosen


def check_able(cuda: list[str]) -> None:
    if os.geteuid() != 0:
        raise Unable("make bare needs root, to unpack and enter a Debian. Nothing was done.")
    for program, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("git", "git")):
        if not shutil.which(program):
            raise Unable(f"make bare needs {program} (package {package}). Nothing was done.")
    if "yes" in cuda and not toolkit():
        raise Unable("--cuda yes: no nvcc on PATH. With --cuda no the rest can be tried.")


def enter_namespace() -> None:
    """Starts this program again, with mounts and processes that end with it, however it ends."""
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        options = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        os.execvp("unshare", ["unshare", *options, sys.executable, *sys.argv])
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    # The first process of a namespace ignores what it does not handle.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("make bare: ended by a signal"))


def main() -> int:
    options = parse_options()
    try:
        check_able(options.cuda)
        enter_namespace()
        WORK.mkdir(parents=True, exist_ok=True)
        commit = call("git", "-C", str(ROOT), "log", "-1", "--format=%h %s").strip()
        print(f"{os.cpu_count()} cores, commit {commit}; what is not committed is not tried", flush=True)
        choices = itertools.product(options.release, options.cuda, options.user)
        variants = [Variant(release, cuda == "yes", user == "root") for release, cuda, user in choices]
        results = {}
        for variant in variants:
            try:
                results[variant] = try_variant(variant, options.steps, options.python)
            except Unable as reason:
                print(f"  FAILED: {reason}", flush=True)
                results[variant] = {"packages": (False, Minutes(0, 0))}
    except Unable as reason:
        print(reason, file=sys.stderr)
        return 1

    columns = ["packages", *options.steps]
    print(f"\n{'minutes (of CPU)':<32}" + "".join(f"{step:>16}" for step in columns))
    for variant, steps in results.items():
        cells = [cell(*steps[step]) if step in steps else "" for step in columns]
        print(f"{variant!s:<32}" + "".join(f"{text:>16}" for text in cells))
    outcomes = [passed for steps in results.values() for passed, _ in steps.values()]
    print(f"{sum(outcomes)} passed, {len(outcomes) - sum(outcomes)} failed", flush=True)
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
