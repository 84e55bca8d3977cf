"""A soak: random calls on four streams for minutes, by bin/tilewise_soak of a staged tree."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from gpu_programs import Outcome, Suites, run, show_failure, skipped

LATE = 300  # seconds that the last round may take beyond its end


def soak_suites(options: argparse.Namespace, no_gpu: str, capability: int) -> Suites:
    """A soak draws from what every GPU can do, whatever its compute capability."""
    call = partial(skipped, "soak", no_gpu) if no_gpu else partial(soak_test, options.soak, options.seed)
    yield "soak", call


def soak_test(minutes: float, seed: int) -> Outcome:
    """What passes is a call whose results have the bits that they had alone."""
    command = ["bin/tilewise_soak", f"--seconds={60 * minutes:g}", f"--seed={seed}"]
    status, output = run(command, 60 * minutes + LATE)
    found = last_line(output)
    failures = found.pop("failures", ["it ended without its closing line"])
    outcome = Outcome(
        "soak", failed=len(failures), more={"exit_status": status, "failures": failures} | found
    )
    outcome.passed = sum(found.get("calls", {}).values()) - outcome.failed if found else 0
    if status != 0 and not failures:
        outcome.failed = 1
    if outcome.failed:
        show_failure(command, output)
    return outcome


def last_line(output: str) -> dict[str, Any]:
    """What the program says of itself at its end; nothing where it was stopped or crashed."""
    lines = output.splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
