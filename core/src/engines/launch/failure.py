"""What the launcher says when a run fails: the first cause, once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engines.errors import EnginesError
from engines.launch.exchange import Exchange
from engines.launch.processes import RankProcess
from engines.launch.reports import Death, Report, first_cause, tells_no_memory

_SUSPICIOUS_S: Final = 5.0
"""A rank that was silent for so long when others lost it is named as the cause."""
_LESS_MEMORY: Final = (
    "Smaller micro-batches (engine.max_tokens_per_micro_batch) need less, and so do more processes"
    " and engines that shard or recompute; see docs/troubleshooting.md."
)


@dataclass(frozen=True)
class Silent:
    """A rank that shows no sign of life."""

    rank: int
    seconds: float
    place: str
    stopped: bool

    def __str__(self) -> str:
        state = ", because somebody stopped its process (SIGSTOP)" if self.stopped else ""
        return f"rank {self.rank} has shown no sign of life for {self.seconds:.0f} s, since {self.place}{state}"


def silent_ranks(ranks: Sequence[RankProcess], timeout_s: float, *, late: bool = False) -> list[Silent]:
    """Ranks that run and say nothing: for `timeout_s` if `late`, else for suspiciously long."""
    limit = timeout_s if late else min(timeout_s, _SUSPICIOUS_S)
    return [
        Silent(rank.rank, seconds, rank.watch.place(), rank.is_stopped())
        for rank in ranks
        if (seconds := rank.watch.silent_s()) > limit and rank.code is None
    ]


def fail_silent(silent: Sequence[Silent], timeout_s: float) -> int:
    """Say which ranks hang; returns the exit code."""
    say("\n".join(map(str, silent)), f"launch.timeout_s is {timeout_s:g}; the run was ended.")
    return 1


def fail(
    ranks: Sequence[RankProcess], codes: Sequence[int | None], silent: Sequence[Silent], exchange: Exchange
) -> int:
    """Say why the run failed; returns the exit code. `codes`: before the launcher ended anything itself.

    Raises `EnginesError` where that is the first cause, with the rank's traceback as a note.
    """
    reports = [report for rank in ranks if (report := Report.read(exchange.report(rank.rank)))]
    reported = {report.rank for report in reports}
    deaths = [
        Death(rank.rank, code)
        for rank, code in zip(ranks, codes, strict=True)
        if code not in (None, 0) and rank.rank not in reported
    ]
    cause = first_cause(reports, deaths)
    match cause:
        case Report(kind="user"):
            error = EnginesError(cause.message, cause.remedy)
            error.add_note(f"In rank {cause.rank}:\n{cause.traceback}")
            raise error
        case Report(kind="peer") if silent:
            say("\n".join(map(str, silent)), f"Others waited for it: rank {cause.rank}: {cause.message}")
        case Report(kind="peer"):
            places = "\n".join(f"  rank {rank.rank}: {rank.watch.place()}" for rank in ranks)
            say(f"rank {cause.rank} lost the others: {cause.message}", f"They were at\n{places}\n{cause.traceback}")
        case Report():
            say_report(cause, ranks[cause.rank].watch.place())
        case Death():
            output = ranks[cause.rank].last_output()
            if tells_no_memory(output):
                say(f"rank {cause.rank} ran out of memory: {cause}", f"{_LESS_MEMORY}\n{output}")
            else:
                say(str(cause), output)
    return 1


def say_report(report: Report, place: str) -> None:
    """Tell the user what ended a rank that was at `place`."""
    match report.kind:
        case "stopped":
            say(report.message.partition(": ")[2])
        case "memory":
            say(f"rank {report.rank} ran out of memory ({place}): {report.message.splitlines()[0]}", _LESS_MEMORY)
        case "peer":
            say(f"rank {report.rank} lost the others: {report.message}", f"It was at {place}\n{report.traceback}")
        case _:
            say(f"rank {report.rank} failed: {report.message}", report.traceback)


def say(message: str, details: str = "") -> None:
    """Tell the user why the run failed."""
    print(f"Error: {message}", *([details.rstrip()] if details else []), sep="\n", file=sys.stderr)
