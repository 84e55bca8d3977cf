"""The `tilewise` command."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import _binding
from tilewise.bench import (
    check,
    compare,
    environment,
    files,
    implementations,
    kinds,
    measure,
    operands,
    profile,
    profile_all,
    rates,
    records,
    report,
    roofline,
    run,
    suites,
    summary,
    table,
    timing,
    tune,
)
from tilewise.bench.implementations import Implementation
from tilewise.bench.kinds import AnyProblem
from tilewise.bench.operations import OPERATIONS
from tilewise.bench.plots import all_files
from tilewise.bench.problem import ITEM_BYTES, PASSES, PRECISIONS, BadInput, Problem

LIMIT_MS = {"cpu": 300.0, "cuda": 100.0}
DEFAULT_SHAPE = "hq=8 sq=1024 d=64"
DEFAULT_CHECK = ("hq=4 hkv=2 sq=197 d=64", "hq=2 sq=128 sk=200 d=128", "hq=2 sq=150 d=40 mask=padding",
                 "hq=2 sq=300 d=64 window=32", "hq=1 sq=33 d=257", "hq=2 sq=256 d=32 blocks=0.5")  # fmt: skip
# What `tune` times unless told: shapes of common models, then the products of a Llama layer.
DEFAULT_TUNE = (
    *("b=16 hq=16 sq=1024 d=64", "b=8 hq=16 sq=1024 d=128", "b=2 hq=32 hkv=8 sq=4096 d=128"),
    *("b=16 hq=12 sq=197 d=64", "b=4 hq=16 hkv=4 sq=512 d=128", "b=4 hq=8 sq=2048 d=256"),
)
DEFAULT_TUNE_PRODUCTS = tuple(
    f"op=gemm m={m} n={n} k={k}" for m in (512, 4096) for n, k in ((4096, 4096), (11008, 4096), (4096, 11008))
)


def default_out() -> Path:
    """Where records go unless told: the build folder of a checkout, else a folder of their own here."""
    checkout = Path("CMakeLists.txt").is_file() and Path("python/tilewise").is_dir()
    return Path("build/bench") if checkout else Path("tilewise-bench")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; `arguments` are those of the process unless given."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # here, and not when Python ends, where a closed pipe gives status 120
    except BrokenPipeError:  # the reader had enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    options.line = shlex.join(["tilewise", *arguments])
    try:
        return options.command(options)
    except BadInput as error:
        print(f"tilewise: {error}", file=sys.stderr)
        return 2
    except (tilewise.Error, measure.DeviceLost) as error:
        print(f"tilewise: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# Options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tilewise", description=tilewise.__doc__)
    parser.add_argument("--version", action="version", version=f"tilewise {tilewise.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[Any], int], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        command.set_defaults(command=function)
        return command

    command = add("info", _info, "show versions, devices, and which kernels are usable here")
    command.add_argument(
        "--measure", action="store_true", help="also measure the rates of products and a copy"
    )

    command = add("explain", _explain, "say which kernel a problem would get, and why not the others")
    _problem_options(command, several=False)
    command.add_argument("--gradient", action="store_true", help="explain the backward pass as well")
    command.add_argument(
        "--call", type=Path, metavar="FILE", help="the arguments of attention: a dict saved by torch.save"
    )

    command = add("check", _check, "compare every kernel's error with PyTorch's, both against float64")
    _problem_options(command, several=True)
    _selection_options(command)
    some = "kernels by name or part of a name, separated by commas (default: all)"
    command.add_argument("--kernels", type=_words, default=(), help=some)
    rule = "of f16 and bf16: compare with PyTorch in 16 bits (standard) or in f32 (strict)"
    command.add_argument("--precision", choices=PRECISIONS, help=rule)

    command = add("bench", _bench, "measure our kernels and their peers, and write a report")
    _problem_options(command, several=True)
    _selection_options(command)
    some = "kernels and peers by name or part of a name, separated by commas (default: all)"
    command.add_argument("--kernels", type=_words, default=(), help=some)
    rounds = "rounds on a GPU (default: %(default)s)"
    command.add_argument("--runs", type=int, default=timing.LEAST_RUNS, help=rounds)
    each = "time for each implementation on a CPU (default: %(default)s)"
    command.add_argument("--seconds", type=float, default=0.3, help=each)
    defaults = ", ".join(f"{ms:g} on {on}" for on, ms in LIMIT_MS.items())
    limits = f"leave out what takes longer than this (default: the suite's limit, or {defaults})"
    command.add_argument("--limit-ms", type=float, help=limits)
    within = "start no new problem after this time; run the command again to continue (default: no limit)"
    command.add_argument("--within", type=float, metavar="SECONDS", help=within)
    command.add_argument("--threads", type=int, help="CPU threads (default: torch's number)")
    folder = "folder for the records (default: %(default)s)"
    command.add_argument("--out", type=Path, default=default_out(), help=folder)
    command.add_argument("--fresh", action="store_true", help="start anew, even if a run was interrupted")
    compiled = "also measure torch.compile in gemm, ffn, norm and layer, which takes minutes"
    command.add_argument("--compile", action="store_true", help=compiled)
    command.add_argument("--no-report", action="store_true", help="do not write the HTML report")
    command.add_argument("--list", action="store_true", help="list suites and implementations, run nothing")

    command = add("tune", _tune, "find the fastest configurations on this GPU, and use them from then on")
    _problem_options(command, several=True)
    _selection_options(command)
    command.add_argument("--runs", type=int, default=timing.LEAST_RUNS, help=rounds)
    where = "file to write (default: TILEWISE_TUNING, or tilewise/tuning.json in the user's cache folder)"
    command.add_argument("--out", type=Path, metavar="FILE", help=where)
    command.add_argument("--fresh", action="store_true", help="discard what the file has")

    command = add("roofline", _roofline, "compare every row of records with measured rates")
    _record_arguments(command)

    command = add("profile", _profile, "run kernels under ncu or nsys and say what bounds them")
    _problem_options(command, several=False)
    command.set_defaults(dtype=None, direction=None)
    command.add_argument("--kernel", default="auto", help="a kernel or a peer (default: the chosen kernel)")
    tool = "profiler (default: the first of these that is installed)"
    command.add_argument("--tool", choices=("ncu", "nsys", "torch"), help=tool)
    every = "profile every kernel and peer, by default in f32 and bf16, forward and backward; needs --out"
    command.add_argument("--all", action="store_true", help=every)
    kept = "folder for the reports of ncu and nsys and for the counters that `tilewise report` shows"
    command.add_argument("--out", type=Path, metavar="DIR", help=kept)
    command.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)

    command = add("report", _report, "draw an HTML page and plots from records")
    _record_arguments(command)
    earlier = "an earlier run (files or folders, separated by commas), to show what became faster or slower"
    command.add_argument("--against", type=_words, default=(), metavar="OLD", help=earlier)
    command.add_argument("--out", type=Path, help="the page (default: report.html beside the records)")
    command.add_argument("--plots", type=Path, metavar="FOLDER", help="also write every plot as SVG")
    command.add_argument("--png", action="store_true", help="with --plots: also as PNG (needs matplotlib)")
    return parser


def _problem_options(command: argparse.ArgumentParser, several: bool) -> None:
    sizes = '"b=1 hq=8 hkv=8 sq=1024 sk=1024 d=64 dv=64"; also mask=additive|padding window=256 blocks=0.25'
    if several:
        features = f"{sizes} dropout=0.1 deterministic=true; repeatable"
        command.add_argument("--shape", action="append", default=[], help=features)
        command.add_argument(
            "--suite", type=_words, default=(), help="names or files, separated by commas, or all"
        )
    else:
        command.add_argument("--shape", default=DEFAULT_SHAPE, help=f"{sizes} (default: %(default)s)")
        command.add_argument("--dtype", default="f32", choices=tuple(ITEM_BYTES))
        command.add_argument("--pass", dest="direction", default="forward", choices=PASSES)
        command.add_argument("--causal", default="no", choices=("yes", "no"))
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")


def _selection_options(command: argparse.ArgumentParser) -> None:
    dtypes = "f32, f16, bf16, separated by commas (default: the suite's)"
    command.add_argument("--dtype", type=_words, default=(), help=dtypes)
    passes = f"{', '.join(PASSES)}, separated by commas (default: the suite's)"
    command.add_argument("--pass", dest="passes", type=_words, default=(), help=passes)
    command.add_argument("--causal", choices=("yes", "no", "both"), help="default: the suite's")


def _record_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "records",
        nargs="*",
        type=Path,
        default=[default_out()],
        help=f"files or folders of records (default: {default_out()})",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _selection(options: Any) -> suites.Selection:
    suites.check_each("--dtype", options.dtype, tuple(ITEM_BYTES))
    suites.check_each("--pass", options.passes, PASSES)
    causal = {None: (), "yes": (True,), "no": (False,), "both": (False, True)}[options.causal]
    return suites.Selection(options.dtype, options.passes, causal)


def _one_problem(options: Any) -> AnyProblem:
    return _problems(options, (options.dtype or "f32",), (options.direction or "forward",))[0]


def _problems(options: Any, dtypes: tuple[str, ...], passes: tuple[str, ...]) -> list[AnyProblem]:
    """Those of the options' one shape."""
    found = suites.shape(options.shape, suites.Selection(dtypes, passes, (options.causal == "yes",)))
    if not found:
        raise BadInput(f"--pass: expected a pass of this operation, got {options.direction!r}")
    return found


# Commands


def _info(options: Any) -> int:
    print(info(options.measure))
    return 0


def info(measured: bool = False) -> str:
    """What is installed, what it can run on, and which kernels are usable there.

    >>> info().splitlines()[0].startswith("tilewise")
    True
    """
    lines = [
        f"tilewise  {tilewise.__version__}",
        f"torch     {torch.__version__}",
        f"python    {platform.python_version()}",
        f"cpu       {environment.cpu_name()}, {environment.cores()} cores, {torch.get_num_threads()} threads",
        f"simd      {', '.join(_binding.simd_levels()) or 'none'}",
    ]
    built = environment.cuda_build(_binding.cuda_code(), _binding.attention_kernels())
    lines += [f"{'cuda' if n == 0 else '':10}{line}" for n, line in enumerate(built)]
    lines.append(f"tuning    {tune.status().text()}")
    devices = [torch.device("cpu")]
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        size = f"{of.total_memory / 2**30:.0f} GiB, {of.multi_processor_count} multiprocessors"
        lines.append(f"gpu {number}     {of.name}, compute capability {of.major}.{of.minor}, {size}")
        devices = [torch.device("cuda"), *devices[-1:]]
    if len(devices) == 1:
        lines.append("gpu       none that this PyTorch can use")
    for device in devices:
        lines.append(f"\nkernels on {device.type}")
        verdicts = implementations.kernels_on(device)
        width = table.column(verdicts)
        lines += [f"  {kernel:{width}}{verdict}" for kernel, verdict in verdicts.items()]
        if measured:
            machine = records.Record(rates=rates.measure(device, {"f32", "bf16"}))
            lines.append(table.rates(machine))
    return "\n".join(lines)


def _explain(options: Any) -> int:
    if options.call:
        call = _saved_call(options.call)
        try:
            print(tilewise.explain(**call))
        except TypeError as error:  # not the arguments that attention has
            raise BadInput(f"--call: {options.call}: {measure.reason_of(error)}") from None
        return 0
    problem = _one_problem(options)
    if not isinstance(problem, Problem):
        raise BadInput(f"--shape: expected attention, the one operation explained here, got op={problem.op}")
    device = environment.choose_device(options.device)
    with measure.making(problem):
        tensors = operands.Operands.random(problem, device)
    if options.gradient:
        for tensor in tensors.inputs:
            tensor.requires_grad_()
    bound: Any = implementations.bind_tilewise("auto", problem, tensors)
    print(tilewise.explain(*bound.args, **bound.keywords))
    return 0


def _saved_call(path: Path) -> dict[str, Any]:
    """Attention's arguments by name, as `torch.save` wrote them."""
    try:
        call = torch.load(path, weights_only=True)
    except Exception as error:  # torch has many reasons
        raise BadInput(f"--call: cannot read {path}: {measure.reason_of(error)}") from None
    if not isinstance(call, dict) or not {"query", "key", "value"} <= set(call):
        raise BadInput(
            f"--call: expected a dict with query, key and value in {path}, got {type(call).__name__}"
        )
    return call


def _check(options: Any) -> int:
    device = environment.choose_device(options.device)
    selection = _selection(options)
    names = options.suite
    problems = [problem for name in names for problem in suites.load(name, selection).problems]
    shapes = options.shape or (() if names else DEFAULT_CHECK)
    if not (names or options.dtype):
        selection = suites.Selection(("f32", "f16", "bf16"), selection.passes, selection.causal)
    if not (names or options.passes):
        selection = suites.Selection(selection.dtypes, ("forward", "backward"), selection.causal)
    problems += [problem for text in shapes for problem in suites.shape(text, selection)]
    if options.precision:
        problems = [
            replace(problem, precision=options.precision) if isinstance(problem, Problem) else problem
            for problem in problems
        ]
    run.check_kernels(options.kernels, problems, device)
    flops = measure.Settings(device).checked_flops
    with timing.precision(tf32=False):
        return 1 if check.check(problems, options.kernels, device, flops) else 0


def _bench(options: Any) -> int:
    device = environment.choose_device(options.device)
    limit_ms = LIMIT_MS[device.type] if options.limit_ms is None else options.limit_ms
    for name, value, least in (
        ("--runs", options.runs, timing.LEAST_RUNS),
        ("--seconds", options.seconds, 0.0),
        ("--limit-ms", limit_ms, 0.0),
        ("--within", options.within or 0.0, 0.0),
        ("--threads", 1 if options.threads is None else options.threads, 1),
    ):
        if not value >= least or (name == "--seconds" and math.isinf(value)):
            raise BadInput(f"{name}: expected {least:g} or more, got {value:g}")
    if options.threads:
        try:
            torch.set_num_threads(options.threads)
        except ValueError:  # more than an int holds
            raise BadInput(f"--threads: expected a number of threads, got {options.threads}") from None
    if options.list:
        return _list(device)
    selection = _selection(options)
    chosen = _suites(options, device, selection)
    settings = measure.Settings(device, options.runs, options.seconds, limit_ms)
    plan = run.Plan(settings, chosen, options.kernels, options.out, options.fresh)
    plan.compiled, plan.within, plan.report = options.compile, options.within, not options.no_report
    plan.own_limits, plan.command = options.limit_ms is None, options.line
    written, finished = run.run(plan)
    found = [record for record in map(records.read, written) if record.rows]
    if found:
        print("\n" + summary.text(summary.by_machine(found)))
        print(f"\nrecords   {', '.join(str(path) for path in written)}")
        if not options.no_report:
            page = written[0].with_name(run.REPORT)
            with files.writing("--out", page):
                files.replace(page, report.page(found, command=options.line))
            print(f"report    {page}")
    if finished is False:
        return 130
    return 1 if any(_wrong(line) for record in found for line in record.rows) else 0


def _wrong(line: records.Line) -> bool:
    return str(line.get("skipped", "")).startswith("WRONG")


def _suites(options: Any, device: torch.device, selection: suites.Selection) -> list[suites.Suite]:
    names: Sequence[str] = options.suite
    if "all" in names or (not names and not options.shape and device.type == "cuda"):
        names = [name for name in suites.names(device.type) if name != "quick"]
    elif not names and not options.shape:
        names = ("quick",)
    chosen = [suites.load(name, selection) for name in names]
    if options.shape:
        own = tuple(problem for text in options.shape for problem in suites.shape(text, selection))
        chosen.append(suites.Suite("shape", "", ("cpu", "cuda"), own))
    return chosen


def _list(device: torch.device) -> int:
    for name in suites.names():
        suite = suites.load(name)
        where = ", ".join(suite.devices) or "if asked"
        print(f"{name:22}{len(suite.problems):>3} problems  {where:10}  {suite.about}")
    print(f"\non {device.type}")
    for op in (Problem.op, *OPERATIONS):
        print(f"  {op:18}{', '.join(x.name for x in kinds.taking_part(op, device))}")
    print(f"  {implementations.missing(device)}")
    return 0


def _tune(options: Any) -> int:
    device = environment.choose_device(options.device)
    if options.runs < timing.LEAST_RUNS:
        raise BadInput(f"--runs: expected {timing.LEAST_RUNS} or more, got {options.runs}")
    status = tune.status()
    out = options.out or Path(status.path)
    if not (options.out or status.path):
        raise BadInput("--out: expected a file, since TILEWISE_TUNING turns tuning off")
    files.check_writable("--out", out)
    if device.type == "cpu" and not (options.shape or options.suite):
        print("tilewise tune is for GPUs: a kernel of the CPU has one configuration. Nothing was written")
        return 0
    selection = _selection(options)
    problems = [problem for name in options.suite for problem in suites.load(name, selection).problems]
    shapes = options.shape or (() if options.suite else DEFAULT_TUNE)
    if not options.suite:
        selection = suites.Selection(
            selection.dtypes or ("bf16", "f32"),
            selection.passes or ("forward", "backward"),
            selection.causal or (False, True),
        )
    problems += [problem for text in shapes for problem in suites.shape(text, selection)]
    if shapes is DEFAULT_TUNE and "bf16" in selection.dtypes:
        products = suites.Selection(("bf16",), ("forward",))
        problems += [problem for text in DEFAULT_TUNE_PRODUCTS for problem in suites.shape(text, products)]
    if options.fresh:
        tune.use(status.contents | {"choices": []})
    contents, asked = tune.status().contents, 0
    for number, problem in enumerate(dict.fromkeys(problems), 1):
        print(f"[{number}/{len(problems)}] {problem}", flush=True)
        with measure.making(problem):
            answers = tune.tune(problem, device, options.runs, 0.3)
        for answer in answers:
            asked += 1
            _print_answer(answer)
        if not answers:
            print("    one configuration, nothing to choose")
            continue
        contents = tune.merged(contents, [answer.choice() for answer in answers])
        with files.writing("--out", out):  # after each, so that an interrupted run keeps what it has
            files.replace(out, json.dumps(contents, indent=1) + "\n")
    if not asked:
        print(f"no kernel that was chosen on {device.type} has several configurations; nothing was written")
        return 0
    print(f"\nwritten   {out}: {len(contents['choices'])} choices")
    if out != Path(status.path):
        print(f"to use it: TILEWISE_TUNING={out}")
    return 0


def _print_answer(answer: tune.Answer) -> None:
    print(f"    {answer.question.table}: {answer.question.problem}")
    for row, (text, time) in enumerate(zip(answer.question.rows, answer.times, strict=True)):
        words = ["default"] * (row == answer.question.default) + ["taken"] * (row == answer.best)
        print(f"    {1e3 * time.ms:10.1f} us  {text}{'  <- ' if words else ''}{', '.join(words)}", flush=True)


def _roofline(options: Any) -> int:
    print(roofline.text(records.read_all(options.records)))
    return 0


def _profile(options: Any) -> int:
    device = environment.choose_device(options.device)
    if options.all and not (options.out or options.watched):
        raise BadInput("--all: expected --out as well, got none")
    if options.out and options.tool:
        raise BadInput("--tool: expected none with --out, which uses all installed tools, got one")
    targets = _profile_targets(options, device)
    if options.out:
        return _profile_into(options, targets, device)
    if options.watched and options.all:
        profile_all.watch(targets, device)
    elif options.watched:
        profile.watched(*targets[0], device)
    else:
        print(profile.run(*targets[0], device, options.tool))
    return 0


def _profile_targets(options: Any, device: torch.device) -> list[tuple[Implementation, AnyProblem]]:
    problems = [_one_problem(options)]
    if options.all:
        dtypes = (options.dtype,) if options.dtype else ("f32", "bf16")
        problems = _problems(
            options, dtypes, (options.direction,) if options.direction else ("forward", "backward")
        )
    every = kinds.taking_part(problems[0].op, device)
    if options.all and options.kernel == "auto":
        return [(x, problem) for problem in problems for x in every if not x.on_demand]
    found = []
    for problem in problems:
        name = kinds.chosen(problem, device) if options.kernel == "auto" else options.kernel
        if not (of_name := [x for x in every if x.name == name]):
            raise BadInput(f"--kernel: expected one of {', '.join(x.name for x in every)}, got {name!r}")
        found.append((of_name[0], problem))
    return found


def _profile_into(
    options: Any, targets: Sequence[tuple[Implementation, AnyProblem]], device: torch.device
) -> int:
    here = environment.describe(device) | {"command": options.line}
    folder = options.out / environment.slug(here)
    files.check_writable("--out", folder / profile_all.RECORD)
    by_target = {profile_all.Target(x.name, problem): x for x, problem in targets}
    if device.type == "cpu":
        found = profile_all.on_cpu(by_target)
    else:
        first = targets[0][1]
        given = {"--dtype": options.dtype, "--pass": options.direction}
        if not options.all:
            given = {"--dtype": first.dtype, "--pass": first.direction}
        chosen = [word for pair in given.items() if pair[1] for word in pair]
        if not options.all or options.kernel != "auto":
            chosen += ["--kernel", targets[0][0].name]

        def by_torch(target: profile_all.Target) -> profile_all.Kernels:
            kernels = profile.torch_kernels(by_target[target], target.problem, device)
            return [(kernel["name"], profile.torch_figures(kernel)) for kernel in kernels]

        chosen += ["--shape", options.shape, "--causal", options.causal]
        found = profile_all.run(list(by_target), folder, chosen, by_torch)
    with files.writing("--out", folder):
        files.replace(folder / profile_all.RECORD, found.record(here))
        files.replace(folder / profile_all.TEXT, found.text() + "\n")
    print(found.text())
    print(f"\nkept      {folder}")
    return 0


def _report(options: Any) -> int:
    if options.png and not options.plots:
        raise BadInput("--png: expected --plots as well, got none")
    found = records.read_all(options.records)
    earlier = records.read_all([Path(path) for path in options.against]) if options.against else []
    first = options.records[0]
    page = options.out or (first if first.is_dir() else first.parent) / "report.html"
    files.check_writable("--out", page)
    if options.png:
        from tilewise.bench import png

        png.check()
    with files.writing("--out", page):
        files.replace(page, report.page(found, earlier, options.line))
    machines = summary.by_machine(found)
    print(summary.text(machines))
    if earlier:
        for comparison in compare.against(machines, summary.by_machine(earlier)):
            print("\n".join(["", *(compare.sentences(comparison) if comparison else ())]))
    print(f"\nreport    {page}")
    for record in machines if options.plots else ():
        folder = options.plots / environment.slug(record.environment)
        drawings = all_files(record)
        with files.writing("--plots", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, svg in drawings.items():
                files.replace(folder / f"{name}.svg", svg)
            if options.png:
                png.write_all(record, folder)
        print(f"plots     {folder}: {len(drawings)}")
    return 0
