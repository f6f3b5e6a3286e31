"""A disk that can be full: a tmpfs of its own where mounting is allowed, else a limit on the size of files."""

from __future__ import annotations

import resource
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

SIZE: Final = 16 * 2**20
"""Bytes: room for several checkpoints of a tiny model."""


class SmallDisk(Protocol):
    """A folder on a disk that is soon full."""

    path: Path
    full: str
    """What the system says when there is no room."""

    def fill(self, writers: Sequence[int]) -> None:
        """Leave no room for the processes `writers`."""
        ...

    def make_room(self, writers: Sequence[int]) -> None:
        """Undo it, for those of them that still run."""
        ...


class Mounted:
    """A tmpfs; somebody else's file takes the room."""

    full = "No space left on device"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, writers: Sequence[int]) -> None:
        """Write until nothing more fits."""
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(2**12)):
                pass

    def make_room(self, writers: Sequence[int]) -> None:
        """Delete that file."""
        self._filler.unlink()


class Limited:
    """Any folder; the writers' files may be only so large that lines of metrics have room."""

    full = "File too large"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, writers: Sequence[int]) -> None:
        """Less than a checkpoint's largest file."""
        self._limit(writers, 2**16)

    def make_room(self, writers: Sequence[int]) -> None:
        """No limit."""
        self._limit(writers, resource.RLIM_INFINITY)

    def _limit(self, writers: Sequence[int], size: int) -> None:
        for pid in writers:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """Make the folder `path` on such a disk."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        warnings.warn(f"no tmpfs ({done.stderr.strip()}): a limit on file sizes stands in for it", stacklevel=2)
        yield Limited(path)
        return
    try:
        yield Mounted(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
