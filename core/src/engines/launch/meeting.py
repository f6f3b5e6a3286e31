"""Ranks that another launcher started agree that all of them start.

A process group waits long for a rank that doesn't come, and other machines' launchers don't always notice that it
has ended. So each rank says, before there is a group, whether it is ready or why not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from engines.errors import EnginesError, LaunchError
from engines.launch.guards import die_with_parent
from engines.torch_extensions import check_torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REFUSAL_HEARD_S: Final = 60.0
"""For the imports of torch on all machines; a rank that refuses waits no longer for the others."""
FIRST_SPEAKS_S: Final = 1.0
_LEAVING_S: Final = 10.0
_MEND: Final = 2


def foreign_world() -> tuple[int, int] | None:
    """(rank, number of ranks) if another launcher started this process as one of several, else None."""
    if not all(os.environ.get(name) for name in _VARIABLES):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class Refusal:
    """Why a rank doesn't start."""

    rank: int
    host: str
    message: str


@contextmanager
def refusals_heard_by_all(world: tuple[int, int] | None) -> Iterator[None]:
    """An error in this block also ends the ranks that are ready, which then say it on their machines.

    What several ranks of a machine find wrong is said once there, by the first of them; the others end with exit
    code 2. Without a `foreign_world` there is nobody to tell.
    """
    try:
        yield
    except Exception as error:
        if world is None:
            raise
        refused: list[Refusal] = []
        # whatever hinders the meeting, this rank's own error is the one to mend
        with suppress(EnginesError, RuntimeError, OSError):
            refused = Meeting(*world, _REFUSAL_HEARD_S).come(str(error))
        mine = (socket.gethostname(), str(error))
        if any((each.host, each.message) == mine and each.rank < world[0] for each in refused):
            _leave_silently()
        raise


class Meeting:
    """One rank's place at it. On the first rank it may hold the store that the process group meets at: keep it."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        """Find the store at MASTER_ADDR. Raises `LaunchError` if it can't be reached in time."""
        # torchrun starts workers from its main thread; of a cluster's own launcher nobody knows
        die_with_parent(os.getppid(), by_kernel="TORCHELASTIC_RUN_ID" in os.environ)
        check_torch()
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        try:
            store = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))[0]
        except dist.DistError as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise LaunchError(f"rank {rank} could not reach the first rank's machine, {place}: {error}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"engines/start/{attempt}"
        self._store: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # missing from __all__

    def agree(self) -> None:
        """Say that this rank is ready, and return when all are. Raises if one is not; silently, if that was said."""
        refused = self.come(None)
        if not refused:
            return
        here = socket.gethostname()
        if os.environ.get("LOCAL_RANK", "0") != "0" or any(each.host == here for each in refused):
            _leave_silently()
        first = refused[0]
        raise LaunchError(f"rank {first.rank}, on {first.host}, does not start: {first.message}")

    def come(self, refusal: str | None) -> list[Refusal]:
        """Say whether this rank is ready, and hear of all that are not, by rank.

        If there are any, all ranks leave together: the first to go takes others, and perhaps the store, with it.
        """
        from torch.distributed import DistError

        store, words = self._store, ""
        if refusal is not None:
            said = Refusal(self.rank, socket.gethostname(), refusal)
            store.append("refusals", json.dumps(asdict(said)) + "\n")  # type: ignore[attr-defined]  # missing in the stubs
        if store.add("arrived", 1) == self.size:
            store.set("verdict", store.get("refusals").decode() if store.check(["refusals"]) else "")
        try:
            words = store.get("verdict").decode()
        except DistError as error:
            arrived = store.add("arrived", 0)
            raise LaunchError(f"only {arrived} of {self.size} ranks came within {self._timeout_s:g} s") from error
        refused = [Refusal(**_read(line)) for line in words.splitlines()]
        if refused:
            if store.add("heard", 1) == self.size:
                store.set("over", "")
            with suppress(DistError):
                store.wait(["over"], timedelta(seconds=_LEAVING_S))
        return sorted(refused, key=lambda each: each.rank)


def _leave_silently() -> NoReturn:
    """When the rank that speaks has spoken: seeing it end, launchers end the others."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(FIRST_SPEAKS_S)
    raise SystemExit(_MEND)


def _read(line: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(line)
    return read
