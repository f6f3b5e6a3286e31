"""No rank outlives the process that started it, however that one dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_INTERVAL_S: Final = 1.0


def die_with_parent(parent: int, *, by_kernel: bool = True) -> None:
    """End this process, by SIGKILL, when the process `parent`, which started it, ends. Call it first thing.

    A thread looks every second. `by_kernel`: on Linux the kernel does it as well, at once, and even if this
    process is stuck. It does so when the *thread* ends that started this process: only for parents that start
    processes from a thread that stays.
    """
    if by_kernel and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        _end()
    threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
