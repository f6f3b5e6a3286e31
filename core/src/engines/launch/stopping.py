"""Signals that ask a run to stop: each rank finishes its step, all stop after the same one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_code(signum: int) -> int:
    """The exit code of a run that a signal stopped, as shells count: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + signum


def handled_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP where somebody (nohup) has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOP_SIGNALS if not (each is signal.SIGHUP and ignored)]


@contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started in this block get the stop signals, also those sent meanwhile, when they listen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Whether a signal has asked this rank to stop."""

    def __init__(self) -> None:
        self.signal = 0
        """The signal, 0 while there was none."""

    @classmethod
    def install(cls) -> StopRequest:
        """Take over the stop signals in this process, and those `held_back`. Only from the main thread."""
        request = cls()
        for each in handled_signals():
            signal.signal(each, request._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return request

    def release(self) -> None:
        """Give the signals back: from now on they end this process at once."""
        for each in handled_signals():
            signal.signal(each, signal.SIG_DFL)

    def agreed(self) -> int:
        """The signal that any rank got, 0 if none did. Every rank calls it, after the same step."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.signal
        seen = torch.tensor([self.signal])
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return int(seen)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signal = signum
