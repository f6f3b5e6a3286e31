"""The temporary folder through which a launcher and its ranks talk."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

_PREFIX: Final = "engines-"


@dataclass(frozen=True)
class Exchange:
    """File names in that folder."""

    folder: Path

    @property
    def job(self) -> Path:
        """What to run; the launcher writes it."""
        return self.folder / "job.json"

    @property
    def rendezvous(self) -> str:
        """URL at which torch.distributed's ranks meet: a file, since a port free now may be taken later."""
        return f"file://{self.folder}/rendezvous"

    def heartbeat(self, rank: int) -> Path:
        """A rank's signs of life."""
        return self.folder / f"heartbeat-{rank}"

    def report(self, rank: int) -> Path:
        """What ended a rank, in its own words."""
        return self.folder / f"report-{rank}.json"

    def output(self, rank: int) -> Path:
        """What a rank other than the first wrote to its standard output and error."""
        return self.folder / f"output-{rank}"


@contextmanager
def temporary_exchange() -> Iterator[Exchange]:
    """A new one, removed at the end. A launcher that is killed leaves its own, which the next one here removes."""
    _remove_abandoned(Path(gettempdir()))
    with TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        with (folder / ".launcher").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / ".launcher").rename(folder / _lock_name())  # who finds it by this name finds it locked
            yield Exchange(folder)


def _remove_abandoned(temporary: Path) -> None:
    """Those of this user whose launcher, on this machine, no longer holds its lock."""
    for folder in temporary.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _lock_name()).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except OSError:  # in use, something else, or gone meanwhile: to leave it is right
            continue


def _lock_name() -> str:
    return f"launcher-on-{socket.gethostname()}"
