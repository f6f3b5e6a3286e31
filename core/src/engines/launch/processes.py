"""Rank processes as their launcher sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.launch.exchange import Exchange
from engines.launch.heartbeat import Watch
from engines.launch.job import Job
from engines.launch.stopping import held_back
from engines.launch.threads import thread_env

_RENDEZVOUS = "ENGINES_RENDEZVOUS"  # read by engines.process_group, which imports torch


@dataclass
class RankProcess:
    """A rank, running or ended."""

    rank: int
    process: subprocess.Popen[bytes]
    watch: Watch
    log: Path | None
    """Its output; None for the first rank, which speaks to the user."""

    @property
    def code(self) -> int | None:
        """Exit code, negative signal, or None while it runs."""
        return self.process.poll()

    def send(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.code is None:
            self.process.send_signal(signum)

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP), as far as the system tells."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"

    def last_output(self, lines: int = 20) -> str:
        """The end of what it wrote."""
        if self.log is None:
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def start_ranks(job: Job, exchange: Exchange) -> Iterable[RankProcess]:
    """Start the job's ranks one after another, each in a session of its own; they meet in `exchange`.

    A session of its own: Ctrl-C in a terminal reaches the launcher alone, which then asks them to stop.
    """
    job.write(exchange.job)
    for rank in range(job.num_ranks):
        yield _start(job, exchange, rank)


def _start(job: Job, exchange: Exchange, rank: int) -> RankProcess:
    log = None if rank == 0 else exchange.output(rank)
    output = None if log is None else log.open("wb")
    # -P: a folder in the working directory must not shadow an installed package
    words = [sys.executable, "-P", "-m", "engines.launch.rank", str(exchange.folder), str(rank), str(os.getpid())]
    try:
        with held_back():
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(job, exchange, rank),
                start_new_session=True,
            )
    finally:
        if output is not None:
            output.close()
    return RankProcess(rank, process, Watch(exchange.heartbeat(rank)), log)


def _environment(job: Job, exchange: Exchange, rank: int) -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    where_unset = {**thread_env(job.num_ranks), "GLOO_SOCKET_IFNAME": loopback, **job.env}
    world = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_WORLD_SIZE": str(job.num_ranks),
        _RENDEZVOUS: exchange.rendezvous,
    }
    return {**where_unset, **os.environ, **world}


def end_all(ranks: Sequence[RankProcess], *, within_s: float = 0.0) -> None:
    """Wait up to `within_s` for all to end by themselves, then end the rest by SIGKILL, stopped ones too."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(rank.code is None for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
