"""Ranks that another launcher started agree that all of them start, and on what.

A process group waits long for a rank that doesn't come, and other machines' launchers don't always notice that it
has ended. So each rank says, before there is a group, whether it is ready or why not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from engines.errors import ConfigError, EnginesError, LaunchError
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


def has_meeting_place() -> bool:
    """Whether the launcher keeps a store, as torchrun does; one of the first rank's own would end with that rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True)
class Refusal:
    """Why a rank doesn't start."""

    rank: int
    host: str
    agent: str
    """Which of the launcher's own processes started it; empty where it doesn't say."""
    message: str

    def is_at_the_place_of(self, other: Refusal) -> bool:
        """Whether both ranks write to the same terminal or log."""
        return (self.host, self.agent) == (other.host, other.agent)


@contextmanager
def refusals_heard_by_all(world: tuple[int, int] | None) -> Iterator[None]:
    """An error in this block also ends the ranks that are ready, which then say it on their machines.

    What several ranks of a machine find wrong is said once there, by the first of them; the others end with exit
    code 2. Without a `foreign_world` there is nobody to tell.
    """
    try:
        yield
    except Exception as error:
        if world is None or not has_meeting_place():
            raise
        # whatever hinders the meeting, this rank's own error is the one to mend
        with suppress(EnginesError, RuntimeError, OSError):
            Meeting(*world, _REFUSAL_HEARD_S).refuse(str(error))
        raise


class Meeting:
    """One rank's place at it. On the first rank it may hold the store that the process group meets at: keep it."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        """Find the store at MASTER_ADDR. Raises `LaunchError` if it can't be reached in time."""
        die_with_parent(os.getppid())  # torchrun starts workers from its main thread
        check_torch()
        import torch.distributed as dist

        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        try:
            # public, and missing from __all__
            met = dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
            store = next(met)[0]
        except dist.DistError as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise LaunchError(f"rank {rank} could not reach the first rank's machine, {place}: {error}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"engines/start/{attempt}"
        self._store: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # missing from __all__

    def agree(self, alike: Mapping[str, Any]) -> None:
        """Say that this rank is ready, and return when all are.

        `alike` is what must be equal on all ranks, JSON by name. Raises `ConfigError` where it isn't that of the
        first rank, `LaunchError` where another rank isn't ready; ends the process silently, if that was said here.
        """
        if odd := self._compare(alike):
            self.refuse(str(odd))
            raise odd
        refused = self._come(None)
        if not refused:
            return
        me, first = self._refusal(""), refused[0]
        if os.environ.get("LOCAL_RANK", "0") != "0" or any(each.is_at_the_place_of(me) for each in refused):
            _leave_silently()
        raise LaunchError(f"rank {first.rank}, on {first.host}, does not start: {first.message}")

    def refuse(self, message: str) -> None:
        """Say that this rank isn't ready. Ends the process silently, where a rank before it says the same here."""
        if self.rank == 0:
            self._store.set("alike", "")
        me = self._refusal(message)
        said = [each for each in self._come(me) if each.is_at_the_place_of(me) and each.message == message]
        if any(each.rank < self.rank for each in said):
            _leave_silently()

    def _compare(self, alike: Mapping[str, Any]) -> ConfigError | None:
        """What is another here than on the first rank, unless that one refuses."""
        if self.rank == 0:
            self._store.set("alike", json.dumps(_here(alike)))
            return None
        words = self._wait("alike")
        return _differences(alike, json.loads(words)) if words else None

    def _come(self, refusal: Refusal | None) -> list[Refusal]:
        """Say whether this rank is ready, and hear of all that are not, by rank.

        If there are any, all ranks leave together: the first to go takes others, and perhaps the store, with it.
        """
        from torch.distributed import DistError

        store = self._store
        if refusal is not None:
            store.append("refusals", json.dumps(asdict(refusal)) + "\n")  # type: ignore[attr-defined]  # not in the stubs
        if store.add("arrived", 1) == self.size:
            store.set("verdict", store.get("refusals").decode() if store.check(["refusals"]) else "")
        refused = [Refusal(**json.loads(line)) for line in self._wait("verdict").splitlines()]
        if refused:
            if store.add("heard", 1) == self.size:
                store.set("over", "")
            with suppress(DistError):
                store.wait(["over"], timedelta(seconds=_LEAVING_S))
        return sorted(refused, key=lambda each: each.rank)

    def _wait(self, key: str) -> str:
        """What some rank says under this key. Raises `LaunchError` if none does in time."""
        from torch.distributed import DistError

        try:
            return self._store.get(key).decode()
        except DistError as error:
            arrived = self._store.add("arrived", 0)
            raise LaunchError(f"only {arrived} of {self.size} ranks came within {self._timeout_s:g} s") from error

    def _refusal(self, message: str) -> Refusal:
        return Refusal(self.rank, socket.gethostname(), os.environ.get("GROUP_RANK", ""), message)


def compare_in_group(alike: Mapping[str, Any]) -> None:
    """What `Meeting.agree` finds different, where ranks could not meet before their process group. All ranks call it.

    Raises `ConfigError` on all of them.
    """
    from engines.agreement import Peers

    peers = Peers.of()
    first = peers.broadcast(_here(alike))
    with peers.all_or_none("no rank starts", error=ConfigError):
        if odd := _differences(alike, first):
            raise odd


def _here(alike: Mapping[str, Any]) -> dict[str, Any]:
    return {"host": socket.gethostname(), "alike": alike}


def _differences(alike: Mapping[str, Any], first: Mapping[str, Any]) -> ConfigError | None:
    """What is another here than on the first rank, which sent what it has `_here`."""
    theirs = first["alike"]
    names = [name for name in {**theirs, **alike} if theirs.get(name) != alike.get(name)]
    if not names:
        return None
    lines = [f"  {name}: {alike.get(name)!r}, not {theirs.get(name)!r}" for name in names]
    where = f"what is to run on {socket.gethostname()} is not what rank 0, on {first['host']}, is to run:"
    return ConfigError("\n".join([where, *lines]), "Start all ranks with one command, and from the same files.")


def _leave_silently() -> NoReturn:
    """When the rank that speaks has spoken: seeing it end, launchers end the others."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(FIRST_SPEAKS_S)
    raise SystemExit(_MEND)
