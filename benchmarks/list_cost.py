"""What `engines list` costs, against the least that its requirements cost.

Compared are CPU times (user and system) of whole processes, interleaved, medians: `engines list --json`, and an
interpreter that imports pluggy and importlib_metadata and defines one pydantic model. Allowed: 1.5 times that, and
0.1 ms for each installed distribution.

    python benchmarks/list_cost.py [--runs N] [--check]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

import importlib_metadata

BASELINE = """
import importlib_metadata
import pluggy
from pydantic import BaseModel

class Point(BaseModel):
    x: int
    y: int = 0
"""
LIST = "import sys; from engines.cli.main import main; sys.exit(main(['list', '--json']))"

FACTOR = 1.5
PER_DISTRIBUTION_MS = 0.1


def cpu_ms(code: str) -> float:
    """User and system time of one interpreter that runs `code`."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"exit status {status} of:\n{code}")
    return 1000 * (usage.ru_utime + usage.ru_stime)


def measure(runs: int) -> tuple[float, float]:
    """Medians in ms of the baseline and of the command, after one run each that fills the caches."""
    pairs = [(cpu_ms(BASELINE), cpu_ms(LIST)) for _ in range(runs + 1)][1:]
    baseline, command = zip(*pairs, strict=True)
    return statistics.median(baseline), statistics.median(command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="exit code 1 if it costs more than is allowed")
    arguments = parser.parse_args()
    installed = len(list(importlib_metadata.distributions()))
    baseline, command = measure(arguments.runs)
    allowed = FACTOR * baseline + PER_DISTRIBUTION_MS * installed
    print(f"baseline       {baseline:7.1f} ms")
    print(f"engines list   {command:7.1f} ms   {command / baseline:.2f} times the baseline")
    print(f"allowed        {allowed:7.1f} ms   {FACTOR} times, {PER_DISTRIBUTION_MS} ms x {installed} distributions")
    return int(arguments.check and command > allowed)


if __name__ == "__main__":
    sys.exit(main())
