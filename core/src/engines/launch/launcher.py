"""Starts the ranks of a run on this machine, watches them, and ends all when one fails."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

from engines.launch.exchange import Exchange, temporary_exchange
from engines.launch.failure import fail, fail_silent, say, silent_ranks
from engines.launch.job import Job
from engines.launch.processes import RankProcess, end_all, start_ranks
from engines.launch.stopping import STOP_SIGNALS, exit_code, handled_signals

_POLL_S: Final = 0.05
_GRACE_S: Final = 3.0
"""How long ranks may take to report and to end by themselves, once one has failed."""
_GRACEFUL: Final = frozenset({0, *map(exit_code, STOP_SIGNALS)})


def launch(job: Job) -> int:
    """Run the job's ranks to their end; returns the exit code. From the main thread only.

    Ctrl-C and SIGTERM are passed on, so that the ranks stop after their step; a second one ends them at once. Either
    is said.
    Raises `EnginesError` where that is what ended the rank that failed first; any other failure is described on
    standard error. No rank is left behind.
    """
    with temporary_exchange() as exchange:
        ranks: list[RankProcess] = []
        try:
            with _passing_on_signals(ranks) as asked:
                for rank in start_ranks(job, exchange):
                    ranks.append(rank)
                    asked.repeat(rank)
                return _watch(ranks, asked, exchange, job.timeout_s)
        finally:
            end_all(ranks)


class _Asked:
    """What signals asked the launcher for."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.signal = 0
        self.again = False
        self._said = False
        self._ranks = ranks

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.again = self.signal != 0
        self.signal = signum
        for rank in self._ranks:
            rank.send(signal.SIGKILL if self.again else signum)

    def say(self) -> None:
        """Tell the user once what the first signal does: the step may be long."""
        if self.signal and not self._said:
            self._said = True
            name = signal.Signals(self.signal).name
            print(f"{name}: the run stops after this step; a second one ends it at once", file=sys.stderr)

    def say_ended(self) -> None:
        """Tell the user that ranks were ended in the midst of what they did."""
        name = signal.Signals(self.signal).name
        say(f"the run was ended at once by {'a second ' if self.again else ''}{name}; what was saved stays")

    def ended(self, code: int) -> bool:
        """Whether a rank's exit code is this doing: at the second request, or where it didn't listen."""
        return code < 0 and (self.again or code == -self.signal)

    def repeat(self, rank: RankProcess) -> None:
        """Tell a rank that started after the signal came."""
        if self.signal:
            rank.send(self.signal)


@contextmanager
def _passing_on_signals(ranks: Sequence[RankProcess]) -> Iterator[_Asked]:
    asked = _Asked(ranks)
    before = {each: signal.signal(each, asked.note) for each in handled_signals()}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _watch(ranks: Sequence[RankProcess], asked: _Asked, exchange: Exchange, timeout_s: float) -> int:
    while True:
        codes = [rank.code for rank in ranks]
        ended = [code for code in codes if code is not None]
        asked.say()
        if asked.signal and any(map(asked.ended, ended)):
            asked.say_ended()
            return exit_code(asked.signal)
        if not _GRACEFUL.issuperset(ended):
            silent = silent_ranks(ranks, timeout_s)
            end_all(ranks, within_s=_GRACE_S)
            return fail(ranks, codes, silent, exchange)
        if len(ended) == len(ranks):
            return max(ended)
        if silent := silent_ranks(ranks, timeout_s, late=True):
            return fail_silent(silent, timeout_s)
        time.sleep(_POLL_S)
