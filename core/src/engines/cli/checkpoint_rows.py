"""Checkpoints as `engines checkpoint` lists them: one row each. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from engines.checkpoint_folder import (
    MANIFEST,
    Manifest,
    has_manifest,
    is_checkpoint,
    latest,
    read_manifest,
)
from engines.checkpoint_folder.faults import faults
from engines.checkpoint_folder.names import PIECES, STEP
from engines.checkpoint_folder.store import CheckpointStore, Listing, checkpoint_number
from engines.durable import local_folder
from engines.errors import CheckpointError

Status = Literal["complete", "damaged", "incomplete"]
_NAME_ONE = "Name a run's output folder, its checkpoints/, or one checkpoint."
COLOURS = {"complete": "green", "damaged": "red", "incomplete": "yellow"}
_LEFT_BY = {
    "tmp": "is being saved, or its save was interrupted",
    "replaced": "was moved aside for one that replaces it",
    "removed": "is being deleted, or its deletion was interrupted",
}


@dataclass(frozen=True)
class Row:
    """One folder."""

    path: Path
    status: Status
    """complete: every file is there with its size; incomplete: there is no manifest yet, or no longer."""
    faults: tuple[str, ...]
    manifest: Manifest | None

    def as_json(self) -> dict[str, Any]:
        """The object of `engines checkpoint list --json`."""
        info = self.manifest.info if self.manifest else None
        return {
            "path": str(self.path),
            "status": self.status,
            "faults": list(self.faults),
            "step": info.step if info else None,
            "saved": saved_at(self.path, self.manifest) if self.manifest else None,
            "size": self.manifest.size if self.manifest else None,
            "holds": list(self.manifest.held) if self.manifest else [],
            "backend": info.backend if info else None,
            "device": info.device if info else None,
            "world_size": info.world_size if info else None,
            "model": info.model.architecture if info else None,
            "model_type": info.model_type if info else None,
        }


def find_rows(path: str) -> list[Row]:
    """Of the checkpoints in an output folder or its checkpoints/, by step, then what isn't complete; or of one.

    Raises `CheckpointError` where there is no such folder, or it has nothing to do with checkpoints.
    """
    folder = local_folder(path, error=CheckpointError).expanduser()
    if is_step(path):
        return [_row(folder)]
    listing = _listing(folder)
    left = [Row(one.path, "incomplete", (f"{one.path} {_LEFT_BY[one.purpose]}",), None) for one in listing.leftovers]
    others = [_row(path) for path in (*listing.damaged, *listing.unfinished)]
    return [*map(_row, listing.complete.values()), *others, *left]


def find_latest(path: str) -> tuple[Path, list[str]]:
    """The checkpoint that `path` names, or the latest complete one in there; a line for each later, incomplete one.

    Raises `CheckpointError` where there is none.
    """
    folder = local_folder(path, error=CheckpointError).expanduser()
    if is_step(path):
        return folder, []
    listing = _listing(folder)
    last = max(listing.complete, default=-1)
    passed_over = {
        **{damaged: f"is damaged: {why}" for damaged, why in listing.damaged.items()},
        **dict.fromkeys(listing.unfinished, f"has no {MANIFEST}: it was never finished"),
    }
    later = [f"{one.name} {why}" for one, why in passed_over.items() if checkpoint_number(one) > last]
    if last < 0:
        raise CheckpointError("\n".join([f"{path} holds no complete checkpoint", *later]))
    return listing.complete[last], later


def is_step(path: str) -> bool:
    """Whether a folder is one checkpoint, complete or not. Raises `CheckpointError` if there is none."""
    folder = Path(path).expanduser()
    if folder.is_file():
        raise CheckpointError(f"{path} is a file, not a folder", _NAME_ONE)
    if not folder.is_dir():
        others = latest(folder.parent) if STEP.fullmatch(folder.name) else None
        raise CheckpointError(f"there is no folder {path}", others)
    return (
        STEP.fullmatch(folder.name) is not None
        or is_checkpoint(folder)
        or any(next(folder.glob(pattern), None) for pattern in PIECES)
    )


def saved_at(checkpoint: Path, manifest: Manifest) -> str:
    """When it was written, to the second, in local time. A manifest without it has the time of its own file."""
    written = manifest.saved or datetime.fromtimestamp((checkpoint / MANIFEST).stat().st_mtime, UTC)
    return written.astimezone().replace(tzinfo=None).isoformat(" ", "seconds")


def size_of(manifest: Manifest) -> str:
    """Bytes of all files, for people."""
    from rich.filesize import decimal

    return decimal(manifest.size)


def render(rows: list[Row], path: str) -> str:
    """A table, and below it what is wrong with those that aren't complete."""
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return f"{path} holds no checkpoints yet"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for heading in ("CHECKPOINT", "SAVED", "SIZE", "BY", "HOLDS", "STATUS"):
        table.add_column(heading, justify="right" if heading == "SIZE" else "left", no_wrap=heading != "HOLDS")
    for row in rows:
        table.add_row(row.path.name, *_cells(row), f"[{COLOURS[row.status]}]{row.status}[/]")
    console = Console(width=None if sys.stdout.isatty() else 100)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, *(line for row in rows for line in row.faults)])


def _cells(row: Row) -> tuple[str, str, str, str]:
    if row.manifest is None:
        return ("", "", "", "")
    info = row.manifest.info
    by = f"{info.backend} on {info.world_size} {info.device}"
    return saved_at(row.path, row.manifest)[:-3], size_of(row.manifest), by, ", ".join(row.manifest.held)


def _listing(folder: Path) -> Listing:
    inner = folder / "checkpoints"
    listing = CheckpointStore(inner if inner.is_dir() else folder).listing()
    known = inner.is_dir() or folder.name == "checkpoints" or (folder / "metrics.jsonl").is_file()
    if not known and not any(vars(listing).values()):
        raise CheckpointError(f"{folder} holds no checkpoints", _NAME_ONE)
    return listing


def _row(path: Path) -> Row:
    if not has_manifest(path):
        return Row(path, "incomplete", (f"{path} has no {MANIFEST}: it was never finished",), None)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Row(path, "damaged", (error.message,), None)
    found = faults(path, manifest, checksums=False)
    if STEP.fullmatch(path.name) and path.name != f"step-{manifest.info.step}":
        found = [f"{path} is the checkpoint of step {manifest.info.step}", *found]
    return Row(path, "damaged" if found else "complete", tuple(found), manifest)
