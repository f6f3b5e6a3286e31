"""The folder that holds a run's checkpoints; what it says is read from the disk each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from engines.checkpoint_folder.faults import faults
from engines.checkpoint_folder.manifest import read_manifest
from engines.checkpoint_folder.names import MANIFEST, STEP, WRITTEN, has_manifest
from engines.durable import Leftover, delete, leftovers, local_folder, remove
from engines.errors import CheckpointError


@dataclass(frozen=True)
class Listing:
    """What lies in a folder of checkpoints."""

    complete: dict[int, Path]
    """By step, ascending: the manifest is valid, and every file is there with its size."""
    damaged: dict[Path, str]
    """Folders named like a checkpoint that are neither complete nor unfinished, and why."""
    unfinished: list[Path]
    """Folders named like a checkpoint that lack the manifest, as an interrupted copy or deletion leaves them."""
    leftovers: list[Leftover]
    """What an interrupted save, replacement or deletion left."""


class CheckpointStore:
    """The folder `checkpoints/` of a run: `step-N` after N steps. One process writes and cleans up.

    There is no file that says which checkpoint is the latest: what is complete on disk says it, also in a new
    process and after any crash.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_folder(folder, error=CheckpointError)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self.folder / f"step-{step}"

    def listing(self) -> Listing:
        """Look at the folder; nothing is changed. An absent folder holds nothing."""
        if not self.folder.is_dir():
            return Listing({}, {}, [], [])
        paths = {int(match[1]): path for path in self.folder.iterdir() if (match := STEP.fullmatch(path.name))}
        unfinished = [paths[step] for step in sorted(paths) if _is_unfinished(paths[step])]
        faults = {step: _fault(paths[step]) for step in sorted(paths) if paths[step] not in unfinished}
        return Listing(
            complete={step: paths[step] for step, fault in faults.items() if fault is None},
            damaged={paths[step]: fault for step, fault in faults.items() if fault is not None},
            unfinished=unfinished,
            leftovers=[one for one in leftovers(self.folder) if STEP.fullmatch(one.target.name)],
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return list(self.listing().complete)

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        complete = self.listing().complete
        return complete[max(complete)] if complete else None

    def clean_up(self) -> list[str]:
        """Remove what interrupted saves and deletions left, and return one line about each.

        Call it where no other process writes. A checkpoint that was moved aside for one that then didn't come is
        put back. One without manifest, which no save leaves, gets another name: it may have been complete. Damaged
        folders stay: they may be worth a look. Raises `CheckpointError` for what can't be moved or removed.
        """
        done, listing = [], self.listing()
        for path in listing.unfinished:
            with _named(path):
                done.append(_set_aside(path))
        for leftover in listing.leftovers:
            with _named(leftover.path):
                done.append(_put_back_or_delete(leftover))
        return done

    def retain(self, keep: int) -> list[Path]:
        """Delete all complete checkpoints but the `keep` latest; return those deleted.

        They are counted on disk, so those of earlier processes count too; damaged ones do not, so the last
        complete one always stays.
        """
        assert keep >= 1, f"keep={keep} would delete the last checkpoint"
        doomed = list(self.listing().complete.values())[:-keep]
        for path in doomed:
            remove(path)
        return doomed


def checkpoint_number(path: Path) -> int:
    """The N of a folder named step-N."""
    match = STEP.fullmatch(path.name)
    assert match is not None, f"{path} is not named like a checkpoint"
    return int(match[1])


def _set_aside(path: Path) -> str:
    if not any(path.iterdir()):
        delete(path)
        return f"{path}: removed, an empty folder"
    names = (path.with_name(f"{path.name}.incomplete-{number}") for number in count(1))
    aside = path.rename(next(name for name in names if not name.exists()))
    return f"{path}: moved to {aside.name}, since it has no {MANIFEST}; delete it if it isn't needed"


def _put_back_or_delete(leftover: Leftover) -> str:
    path, target = leftover.path, leftover.target
    if leftover.purpose == "replaced" and not target.exists() and _fault(path, target.name) is None:
        path.rename(target)
        return f"{target}: put back, since what was to replace it was never finished"
    delete(path)
    what = "a checkpoint that was never finished" if leftover.purpose == "tmp" else "a deleted checkpoint"
    return f"{path}: removed, {what}"


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}, left of an interrupted save, can't be cleaned up: {error.strerror}",
            "Remove it, or move it away.",
        ) from error


def _is_unfinished(path: Path) -> bool:
    """Whether it is empty, or has files of a checkpoint and not the one that is written last."""
    if not path.is_dir() or has_manifest(path):
        return False
    names = {inner.name for inner in path.iterdir()}
    return not names or any(fnmatch(name, pattern) for name in names for pattern in WRITTEN)


def _fault(path: Path, name: str | None = None) -> str | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    if (name or path.name) != f"step-{manifest.info.step}":
        return f"{path} is the checkpoint of step {manifest.info.step}"
    found = faults(path, manifest, checksums=False)
    return found[0] if found else None
