"""Records: files of JSON lines, the environment first, one line a measurement as it comes.

The last line of a run that came to its end says so; one without it was interrupted and goes on where it
stopped. The C++ benchmark writes the same lines.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.bench import files, lines
from tilewise.bench.lines import FIGURES, Line
from tilewise.bench.problem import BadInput
from tilewise.bench.suites import RENAMED

__all__ = ["FIGURES", "Line", "Record", "Writer", "find", "identity", "problem_of", "read", "read_all"]

IDENTITY = (
    *("suite", "op", "pass", "impl", "device", "dtype", "b", "hq", "hkv", "sq", "sk", "d", "dv"),
    *("causal", "window", "features", "sizes"),
)
# Names that rates had in earlier records.
_RATE_NAMES = {"torch matmul, no TF32": "gemm"}
# What one f32 product costs in f16 products, where tensor cores make it. Our kernels split each number into
# two of f16. PyTorch's memory-efficient kernel and xFormers split it into two of TF32, whose products take
# twice as long.
_OURS_SPLIT = ("mma", "wgmma", "wide", "split", "chunked", "tilewise", "tilewise graph", "products kept")
_SPLIT = {**dict.fromkeys(_OURS_SPLIT, 3), **dict.fromkeys(("torch efficient", "xformers"), 6)}
_WITH_PRODUCTS = ("attention", "gemm", "ffn", "layer", "decode-step")


def identity(line: Line) -> str:
    """What a line measures, for comparing: the same in two runs."""
    return json.dumps([line.get(key) or None for key in IDENTITY])


def problem_of(line: Line) -> str:
    """The same without who: lines of one race have it in common."""
    return json.dumps([line.get(key) or None for key in (*IDENTITY, "threads") if key != "impl"])


@dataclass(frozen=True)
class Yardstick:
    """A measured rate that a row is compared with. It is no limit: a kernel may be above it."""

    tflops: float
    what: str


@dataclass
class Record:
    """What a file holds."""

    environment: dict[str, Any] = field(default_factory=dict)
    rates: list[Line] = field(default_factory=list)
    rows: list[Line] = field(default_factory=list)
    profiles: list[Line] = field(default_factory=list)  # counters of kernels
    finished: bool = False
    source: str = ""
    parts: list[Record] = field(default_factory=list)  # the records that this one joins

    def rate(self, name: str, dtype: str | None, figure: str) -> float | None:
        """The highest of this name and type, where there is one."""
        found = [
            line[figure]
            for line in self.rates
            if line["impl"] == name and line.get("dtype") == dtype and line.get(figure)
        ]
        return max(found, default=None)

    def compute_rate(self, dtype: str) -> float | None:
        """TFLOP/s: the highest of PyTorch's matrix product and, for f32 on a GPU, bare multiply-adds."""
        rates = [self.rate("gemm", dtype, "tflops"), self.rate("multiply-adds", dtype, "tflops")]
        rates += [
            line.get("peak_tflops") or _own_fma_rate(line)
            for line in self.rows
            if line["dtype"] == dtype and (line["device"] == "cpu" or dtype != "f32")
        ]
        return max((rate for rate in rates if rate), default=None)

    @property
    def split_rate(self) -> float | None:
        """TFLOP/s that the rate of the f16 product leaves to f32 numbers, each split into two of f16."""
        tensor = self._tensor_product()
        return tensor.tflops / 3 if tensor else None

    def _tensor_product(self) -> Yardstick | None:
        for dtype in ("f16", "bf16"):
            if rate := self.rate("gemm", dtype, "tflops"):
                return Yardstick(rate, f"PyTorch's matrix product in {dtype}")
        return None

    def yardstick(self, line: Line) -> Yardstick | None:
        """What a line is compared with. In f32 on a GPU that depends on the kernel's way to multiply."""
        dtype = line["dtype"]
        if fma := _own_fma_rate(line):
            return Yardstick(fma, "bare multiply-adds")
        if line["device"] != "cuda" or dtype != "f32":
            rate = line.get("peak_tflops") or self.compute_rate(dtype)
            return Yardstick(rate, f"PyTorch's matrix product in {dtype}") if rate else None
        products = _SPLIT.get(line["impl"], 0) if line["op"] in _WITH_PRODUCTS else 0
        if not products:
            rate = self.compute_rate(dtype)
            return Yardstick(rate, "bare multiply-adds") if rate else None
        if not (one := self._tensor_product()):
            return None
        count = products // 3 if line.get("tf32") else products
        part = {1: "", 2: "half of ", 3: "a third of ", 6: "a sixth of "}[count]
        return Yardstick(
            one.tflops / count, f"{part}{one.what}{' (split numbers)' if products == count else ''}"
        )

    @property
    def copy_rate(self) -> float | None:
        """GB/s."""
        return self.rate("copy", None, "gbps")

    def highest(self) -> list[Line]:
        """The highest rate of each name and type."""
        found: dict[tuple[str, str | None], Line] = {}
        for line in self.rates:
            key = line["impl"], line.get("dtype")
            figure = "tflops" if line.get("tflops") else "gbps"
            if key not in found or (line.get(figure) or 0) > (found[key].get(figure) or 0):
                found[key] = line
        return list(found.values())

    @property
    def machine(self) -> str:
        return self.environment.get("gpu") or self.environment.get("cpu") or "unknown machine"

    @property
    def machine_and_device(self) -> tuple[str, str]:
        """Records in which both are the same belong together."""
        device = self.environment.get("device") or ("cuda" if "gpu" in self.environment else "cpu")
        return self.machine, device

    def parts_of(self, suites: Collection[str]) -> list[Record]:
        """The records that have rows of these suites."""
        return [part for part in self.parts or [self] if any(line["suite"] in suites for line in part.rows)]


def _own_fma_rate(line: Line) -> float | None:
    """TFLOP/s of bare multiply-adds, which the C++ benchmark measures with every row."""
    return line["peak_gflops"] * 1e-3 if line.get("peak_gflops") else None


def days(of: Iterable[Record]) -> str:
    """The day of some records, or the first and the last of several."""
    found = sorted({str(record.environment.get("date", "an unknown day"))[:10] for record in of})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def about(of: Sequence[Record]) -> str:
    """The machine of some records, the software and the days, to begin a sentence with."""
    versions = {str(record.environment.get("torch", "of unknown version")).partition("+")[0] for record in of}
    return f"{of[0].machine}, PyTorch {' and '.join(sorted(versions))}, {days(of)}"


def read(path: Path) -> Record:
    """A record, however it was made. What it says last about a measurement counts."""
    record = Record(source=path.name)
    rows: dict[tuple[str, Any], Line] = {}
    for line in _lines(path):
        if "environment" in line:
            record.environment = line["environment"]
            record.rates += _cpu_rates(line["environment"])
        elif line.get("op") == "rate":
            record.rates.append({**line, "impl": _RATE_NAMES.get(line["impl"], line["impl"])})
        elif line.get("op") == "profile":
            record.profiles.append(line)
        elif "finished" in line:
            record.finished = True
        elif lines.is_row(line):
            line = {"features": "", **line, "suite": RENAMED.get(line["suite"], line["suite"])}
            if line["suite"] == "tf32" and line["dtype"] == "f32":  # older records do not say more
                line["tf32"] = True
            rows[identity(line), line.get("threads")] = line
    record.rows = list(rows.values())
    return record


def _lines(path: Path) -> Iterator[Line]:
    """The lines of a record, each of which is what its kind has to be."""
    try:
        contents = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"records: cannot read {path}: {error.strerror or error}") from None
    if contents[-1] == b"":
        contents.pop()
    for number, content in enumerate(contents, 1):
        place = f"records: {path}, line {number}"
        try:
            line = lines.parsed(content.decode())
        except ValueError:
            if number == len(contents):
                return  # cut off when the run was
            raise BadInput(f"{place}: expected JSON, got {_shown(content)}") from None
        except TypeError:
            raise BadInput(f"{place}: expected an object, got {_shown(content)}") from None
        if wrong := lines.wrong_with(line):
            raise BadInput(f"{place}: {wrong}")
        yield line


def _shown(content: bytes) -> str:
    return repr(content[:40].decode(errors="replace"))


def _cpu_rates(environment: dict[str, Any]) -> list[Line]:
    """The C++ benchmark has the machine's rates in the environment, by threads; the most threads count."""
    rates = []
    if peaks := environment.get("peak_gflops"):
        most = peaks[max(peaks, key=int)]
        rates.append({"op": "rate", "impl": "multiply-adds", "dtype": "f32", "tflops": most * 1e-3})
    if copies := environment.get("copy_gbps"):
        rates.append({"op": "rate", "impl": "copy", "dtype": None, "gbps": copies[max(copies, key=int)]})
    return rates


def find(paths: Sequence[Path]) -> list[Path]:
    """The record files among files and folders."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BadInput(f"records: expected a file or folder, got {str(path)!r}, which is not there")
        found += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    return found


def read_all(paths: Sequence[Path]) -> list[Record]:
    """Records that have rows or counters; a folder may hold others, such as those of tests."""
    records = [record for record in map(read, find(paths)) if record.rows or record.profiles]
    if not any(record.rows for record in records):
        raise BadInput(f"records: nothing measured in {', '.join(map(str, paths))}")
    return records


class Writer:
    """A record as it grows. An interrupted one of the same setting is continued, a finished one replaced.

    Nothing is touched before the first line: a run may end before it comes to this suite.
    """

    def __init__(self, path: Path, environment: dict[str, Any], same: Iterable[str], fresh: bool) -> None:
        files.check_writable("--out", path)
        self.path = path
        self.cut_off = False  # perhaps, in its last line
        self.done: set[str] = set()
        self.rows: list[Line] = []
        self.environment: dict[str, Any] | None = environment  # still to be written
        before = None
        if path.exists() and not fresh:
            before = read(path)
        if before and before.environment and not before.finished:
            for key in same:
                there, here = before.environment.get(key), environment.get(key)
                if there != here:
                    raise BadInput(
                        f"--out: {path} was interrupted with {key} {there}, but it is {here} now: "
                        "give another folder, or --fresh to start anew"
                    )
            self.done = {identity(line) for line in before.rows}
            self.rows = before.rows
            self.environment, self.cut_off = None, True

    @property
    def resumed(self) -> int:
        return len(self.done)

    def has(self, line: Line) -> bool:
        return identity(line) in self.done

    def add(self, line: Line) -> None:
        self._write(line)
        if line.get("op") != "rate":
            self.done.add(identity(line))
            self.rows.append(line)

    def finish(self, date: str) -> None:
        self._write({"finished": date})

    def _write(self, line: Line) -> None:
        with files.writing("--out", self.path):
            if self.environment is not None:
                files.replace(self.path, json.dumps({"environment": self.environment}) + "\n")
                self.environment = None
            elif self.cut_off:
                self._mend()
            self.cut_off = False
            files.append(self.path, json.dumps(line) + "\n")

    def _mend(self) -> None:
        """Takes away a line that was cut off."""
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            files.replace(self.path, content[: content.rfind(b"\n") + 1].decode())
