"""Where a run begins, and the checkpoint that `trainer.resume` names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.checkpoint_folder import MANIFEST, has_manifest, latest, read_manifest, steps
from engines.checkpoint_folder.faults import faults
from engines.errors import CheckpointError, did_you_mean


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    checkpoint: Path | None
    """What to load first; None: the model folder alone."""
    step: int
    """Steps done."""
    finished: bool
    """Nothing is left to do."""


def checkpoint_step(checkpoint: Path) -> int:
    """Steps done at a checkpoint. Raises `CheckpointError` if it is incomplete, or lacks a file or a part of one."""
    if checkpoint.is_file():
        raise CheckpointError(f"trainer.resume: {checkpoint} is a file, not the folder of a checkpoint")
    if not checkpoint.is_dir():
        hint = did_you_mean(checkpoint.name, ("auto", "never")) if len(checkpoint.parts) == 1 else ""
        others = latest(checkpoint.parent) if steps(checkpoint.parent) else None
        raise CheckpointError(f"trainer.resume: there is no checkpoint {checkpoint}.{hint}", others)
    if not has_manifest(checkpoint):
        around = (checkpoint / "checkpoints", checkpoint, checkpoint.parent)
        complete = next((latest(folder) for folder in around if steps(folder)), None)
        raise CheckpointError(f"trainer.resume: {checkpoint} is not a complete checkpoint: no {MANIFEST}", complete)
    found = read_manifest(checkpoint)
    damage = faults(checkpoint, found, checksums=False)
    if damage:
        raise CheckpointError("\n".join(f"trainer.resume: {line}" for line in damage))
    return found.info.step
