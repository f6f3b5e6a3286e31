"""How many threads each rank computes with."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "OMP_NUM_THREADS"


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_env(num_ranks: int) -> dict[str, str]:
    """OMP_NUM_THREADS for each of `num_ranks` processes: a fair share of the cores; empty if the user set it."""
    return {} if os.environ.get(VARIABLE) else {VARIABLE: str(max(1, available_cores() // num_ranks))}


def describe_threads(num_ranks: int) -> str:
    """One line about it, for the start of a run."""
    cores = available_cores()
    env = thread_env(num_ranks)
    threads, why = (env[VARIABLE], f"{VARIABLE} is not set") if env else (os.environ[VARIABLE], f"{VARIABLE} is set")
    note = " (more processes than cores: slow)" if num_ranks > cores else ""
    processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    each = "1 thread" if threads == "1" else f"{threads} threads"
    return f"{processes} on {cores} cores{note}, {each} each ({why})"
