"""Random problems on the GPU: what they are drawn from, and what each kernel took of them."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from gpu_programs import SLEEPING, Outcome, run, show_failure

HOPPER = range(90, 91)
# The compute capabilities that have code of a kernel, where these are not all.
CAPABILITIES = {
    "mma": range(80, 1000),
    "widened": range(80, 1000),
    **dict.fromkeys(("wgmma", "wgmma_halves", "wide_batched"), HOPPER),
}


@dataclass(frozen=True)
class Domain:
    """What random problems are drawn from."""

    arguments: tuple[str, ...] = ()
    share: float = 1.0  # of --count

    def problems(self, count: int) -> int:
        return max(1, round(self.share * count))

    def kernels(self) -> list[str]:
        """The kernels that are named; none where all are meant."""
        named = [argument for argument in self.arguments if argument.startswith("--kernel=")]
        return named[0].partition("=")[2].split(",") if named else []

    def on(self, capability: int) -> Domain | None:
        """The same for the kernels that this compute capability has; nothing where it has none of them.
        tilewise_property fails where the kernels that were named take no problem."""
        if not self.kernels():
            return self
        there = [name for name in self.kernels() if capability in CAPABILITIES.get(name, (capability,))]
        narrowed = f"--kernel={','.join(there)}"
        arguments = (narrowed if word.startswith("--kernel=") else word for word in self.arguments)
        return replace(self, arguments=tuple(arguments)) if there else None

    def reason_against(self, capability: int) -> str:
        return f"{', '.join(self.kernels())}: not for compute capability {capability / 10}"


# Of random problems, wgmma and the backwards of wgmma and mma take few, and few reach the plain kernels: they
# have domains of their own. Of that of wgmma 85 % are taken, so there are more; in f32 few are, and the
# reference is slow. What mma takes in f32 is what the plain kernels of fused mend peaks in. Strict precision
# is another rule for f16 and bf16, and other kernels. Pieces of a whole are what several processes compute.
DOMAINS = {
    "property": Domain(),
    "property wgmma": Domain(("--domain=wgmma", "--kernel=wgmma"), 1.2),
    "property wgmma f32": Domain(("--domain=wgmma-f32", "--kernel=wgmma"), 0.08),
    "property wgmma backward": Domain(("--domain=wgmma-backward", "--kernel=wgmma"), 0.08),
    "property wgmma blocks": Domain(("--domain=wgmma-blocks", "--kernel=wgmma"), 0.1),
    "property wgmma masks": Domain(("--domain=wgmma-masks", "--kernel=wgmma"), 0.2),
    "property wgmma features": Domain(("--domain=wgmma-features", "--kernel=wgmma"), 0.1),
    "property wgmma_halves": Domain(("--domain=wide-heads", "--kernel=wgmma_halves"), 0.1),
    "property wide_batched": Domain(("--domain=wide-f32", "--kernel=wide_batched"), 0.1),
    "property mma": Domain(("--domain=mma", "--kernel=mma")),
    "property mma f32": Domain(("--domain=mma-f32", "--kernel=mma,fused"), 0.1),
    "property plain": Domain(("--domain=plain", "--kernel=fused,mma"), 0.2),
    "property pieces": Domain(("--pieces", "--kernel=fused,mma"), 0.04),
    "property pieces plain": Domain(("--pieces", "--domain=plain", "--kernel=mma,wgmma"), 0.04),
    "property strict": Domain(("--rule=strict",), 0.3),
    "property mma strict": Domain(("--domain=mma", "--kernel=mma,widened", "--rule=strict"), 0.1),
    "property operations": Domain(("--domain=operations",), 0.4),  # gemm, ffn, norm, rope and layers
}


def property_test(suite: str, domain: Domain, count: int, seed: int, jobs: int, timeout: float) -> Outcome:
    """Random problems on the GPU, in several processes since the reference takes most of the time. The first
    of them finds out wrong kernels for all."""
    shares = [count // jobs + (n < count % jobs) for n in range(jobs)]
    seeds = {seed + n: share for n, share in enumerate(shares) if share}
    outcome = Outcome(suite, more={"seeds": seeds})
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def run_share(own_seed: int) -> None:
        command = ["bin/tilewise_property", "--cuda", *domain.arguments, f"--threads={threads}"]
        command += [f"--count={seeds[own_seed]}", f"--seed={own_seed}"]
        command += ["--no-self-test"] if own_seed != seed else []
        status, output = run(command, timeout, **SLEEPING)
        # Counted by its closing line. Without one it was stopped or crashed: one more has failed, the one it
        # was at, and what comes after that was not tried.
        found = re.search(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)
        passed, failed, not_tried = (int(found[1]), int(found[2]), 0) if found else (0, 0, 0)
        if not found:
            progress = re.findall(r"^(\d+) of \d+ problems, (\d+) failed", output, re.MULTILINE)
            tried, missed = map(int, progress[-1]) if progress else (0, 0)
            passed, failed, not_tried = tried - missed, missed + 1, max(0, seeds[own_seed] - tried - 1)
        with lock:
            taken.read(output)  # what a kernel refuses passes, too
            outcome.passed += passed
            outcome.failed += failed if failed or status == 0 else 1
            if not_tried:
                outcome.more["not_tried"] = outcome.more.get("not_tried", 0) + not_tried
            outcome.more.setdefault("failures", []).extend(re.findall(r"--only (0x[0-9a-f]+)", output))
            if status != 0:
                show_failure(command, output)

    taken = Taken()
    lock = threading.Lock()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_share, seeds))
    outcome.more |= taken.line()
    return outcome


class Taken:
    """How many problems each kernel took of each pass and type, and how often it made backward again for the
    same bits, as tilewise_property says at its end."""

    def __init__(self) -> None:
        self.passes: dict[str, Counter[str]] = {}  # by kernel
        self.of_types: dict[str, dict[str, Counter[str]]] = {}
        self.again: Counter[str] = Counter()

    def read(self, output: str) -> None:
        numbers = r"(\d+) forward, (\d+) backward, (\d+) backward again$"
        kernel = ""
        for line in output.splitlines():
            if sums := re.match(rf"(\w+) took {numbers}", line):
                kernel = sums[1]
                passes = Counter(forward=int(sums[2]), backward=int(sums[3]))
                self.passes.setdefault(kernel, Counter()).update(passes)
                self.again[kernel] += int(sums[4])
            elif kernel and (sums := re.match(rf"  of (\w+) {numbers}", line)):
                passes = Counter(forward=int(sums[2]), backward=int(sums[3]))
                self.of_types.setdefault(kernel, {}).setdefault(sums[1], Counter()).update(passes)

    def line(self) -> dict[str, Any]:
        return {
            "taken": {kernel: dict(passes) for kernel, passes in sorted(self.passes.items())},
            "taken_of_types": {
                kernel: {dtype: dict(passes) for dtype, passes in sorted(types.items())}
                for kernel, types in sorted(self.of_types.items())
            },
            "backward_again": dict(sorted(self.again.items())),
        }
