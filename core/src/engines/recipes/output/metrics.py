"""metrics.jsonl: one line a step, in order, on disk before the checkpoint of that step appears."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """The file, opened by the one process that writes it."""

    def __init__(self, path: Path, *, steps_done: int) -> None:
        """Cut the file back to the first `steps_done` steps: a run resumed there does the others again."""
        self._path = path
        self._file = path.open("a+b")
        self._file.truncate(_end_of(self._file, steps_done))
        self._size = self._file.seek(0, os.SEEK_END)

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Write a step's line, visible to readers at once. Raises OSError, and then nothing of it is there."""
        line = json.dumps({name: _finite(value) for name, value in metrics.items()}, allow_nan=False)
        end, rest = os.fstat(self._file.fileno()).st_size, line.encode() + b"\n"
        if not self._path.exists():  # or the lines of hours would go nowhere, until a checkpoint is saved
            raise FileNotFoundError(errno.ENOENT, "it was taken away", str(self._path))
        grown = self._size + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError:
            self._file.truncate(end)
            raise
        self._size = grown

    def sync(self) -> None:
        """Wait until the disk has every line. Raises OSError if the file was taken away meanwhile."""
        os.fsync(self._file.fileno())
        if not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
            raise FileExistsError(errno.EEXIST, "another file has taken its place", str(self._path))
        if (size := os.fstat(self._file.fileno()).st_size) != self._size:
            raise OSError(errno.EIO, f"it has {size} bytes instead of {self._size}: others write it", str(self._path))

    def close(self) -> None:
        """Sync and close."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [line for _, line in _whole_lines(file)]


def holds_lines(path: Path) -> bool:
    """Whether there is a line in the file that was finished, whole or damaged."""
    return path.exists() and b"\n" in path.read_bytes()


def _end_of(file: Any, step: int) -> int:
    """The offset behind the last whole line that belongs to the first `step` steps."""
    file.seek(0)
    end = 0
    for after, line in _whole_lines(file):
        if line["step"] > step:
            break
        end = after
    return end


def _whole_lines(file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line with the offset behind it, up to the first that is torn."""
    offset = 0
    for raw in file:
        offset += len(raw)
        try:
            line = json.loads(raw)
        except ValueError:
            return
        if not raw.endswith(b"\n") or not isinstance(line, dict) or type(line.get("step")) is not int:
            return
        yield offset, line


def _finite(value: Any) -> Any:
    """Non-finite numbers as null, which JSON has, instead of NaN, which it hasn't."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
