"""What ranks do in the launcher's tests: functions of (payload, Rank), without torch."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.errors import DataError
from engines.launch import Rank, RunFailed


def report(payload: Mapping[str, Any], rank: Rank) -> int:
    """Write down the world as this rank sees it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ENGINES_RENDEZVOUS")
    world = {name: os.environ.get(name) for name in names}
    world |= {"rank": rank.rank, "num_ranks": rank.num_ranks, "own_session": os.getsid(0) == os.getpid()}
    _write(payload, rank, json.dumps(world))
    return 0


def defect(payload: Mapping[str, Any], rank: Rank) -> int:
    """Rank 1 has a bug; rank 0 waits for it for ever."""
    if rank.rank == 1:
        raise KeyError("boom")
    return _wait(payload, rank)


def mend(payload: Mapping[str, Any], rank: Rank) -> int:
    """All ranks find the same fault of the user's."""
    raise DataError("data.jsonl, line 3: broken", "Mend it.")


def diverge(payload: Mapping[str, Any], rank: Rank) -> int:
    """All ranks give up for a reason."""
    raise RunFailed("the loss was never finite")


def consequence(payload: Mapping[str, Any], rank: Rank) -> int:
    """Rank 0 loses its peer first, by the clock; but the peer's own error is the cause."""
    if rank.rank == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    time.sleep(0.5)
    raise ValueError("the cause")


def killed(payload: Mapping[str, Any], rank: Rank) -> int:
    """The system ends rank 1; rank 0 then loses it."""
    if rank.rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise RuntimeError("Connection reset by peer")


def hoards(payload: Mapping[str, Any], rank: Rank) -> int:
    """Rank 1 may have 64 MiB more than it has, and asks for a gigabyte."""
    if rank.rank == 1:
        rank.at("hoarding")
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 2**26, held + 2**26))
        bytearray(2**30)
    return _wait(payload, rank)


def aborts(payload: Mapping[str, Any], rank: Rank) -> int:
    """A library's thread gets no memory in rank 1."""
    if rank.rank == 1:
        sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
        sys.stderr.flush()
        os.abort()
    return _wait(payload, rank)


def leaves(payload: Mapping[str, Any], rank: Rank) -> int:
    """A library ends rank 1 without a word."""
    if rank.rank == 1:
        sys.stderr.write("usage: some library\n")
        sys.stderr.flush()
        os._exit(7)
    return _wait(payload, rank)


def steps(payload: Mapping[str, Any], rank: Rank) -> int:
    """Step until asked to stop."""
    for step in range(10_000):
        rank.at(f"step {step}")
        _write(payload, rank, str(os.getpid()))
        time.sleep(0.02)
        if rank.stop.signal:
            _write(payload, rank, f"stopped by {rank.stop.signal}")
            return 128 + rank.stop.signal
    raise AssertionError("nobody stopped this")


def deaf(payload: Mapping[str, Any], rank: Rank) -> int:
    """A step without end."""
    return _wait(payload, rank)


def _wait(payload: Mapping[str, Any], rank: Rank) -> int:
    while True:
        _write(payload, rank, str(os.getpid()))
        time.sleep(0.1)


def _write(payload: Mapping[str, Any], rank: Rank, text: str) -> None:
    file = Path(payload["folder"]) / str(rank.rank)
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)
