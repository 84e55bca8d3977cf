"""Times what a call costs its host, by bin/call_cost of a staged tree on a GPU, and records it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import gpu_record
from gpu_driver import find_gpu
from gpu_record import STAGE, Record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of records")
    options = parser.parse_args()
    gpu_record.check_stage()
    gpu = find_gpu()
    ran = subprocess.run([STAGE / "bin" / "call_cost"], check=True, capture_output=True, text=True)
    record = Record(options.out / gpu.slug / "call-cost.jsonl", gpu)
    print(f"{gpu.name}, driver {gpu.driver}; us of the host")
    for line in map(json.loads, ran.stdout.splitlines()):
        record.add({"suite": "call-cost", **line})
        print("  " + ", ".join(f"{name} {value}" for name, value in line.items()))
    print(f"record in {record.path}")


if __name__ == "__main__":
    main()
