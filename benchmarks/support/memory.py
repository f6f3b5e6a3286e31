"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_MMAP_THRESHOLD = -3
"""glibc's malloc.h"""


def peak() -> int:
    """Highest resident memory of this process since `reset_peak`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Make the kernel forget it."""
    Path("/proc/self/clear_refs").write_text("5")


def keep_nothing_freed() -> None:
    """From now on large tensors that are freed go back to the kernel at once, and what lies free already goes.

    Otherwise glibc keeps some for later, by their sizes and order, and a peak says little about what was needed.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
    libc.malloc_trim(0)
