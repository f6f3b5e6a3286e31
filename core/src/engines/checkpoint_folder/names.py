"""What the files of a checkpoint are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

MANIFEST: Final = "manifest.json"
INDEX: Final = "index.json"
STATE: Final = "state.json"
COPY: Final = "huggingface"
"""Folder of the Hugging Face copy, if a checkpoint holds one."""
STEP: Final = re.compile(r"step-(0|[1-9][0-9]*)")
PRETRAINED: Final = ("model.safetensors", "model.safetensors.index.json")
"""Either holds, or lists, the weights of a Hugging Face folder; no checkpoint has a file of these names."""

PIECES: Final = ("rank-*-of-*.safetensors", "optimizer-*-of-*.safetensors")
"""What no other folder holds than a checkpoint, also one without manifest."""

WRITTEN: Final = (*PIECES, "model-*-of-*.safetensors", INDEX, STATE)
"""What a save writes before the manifest; a Hugging Face folder may have some of it."""

_NOT_FOR_WEIGHTS: Final = re.compile(rf"(optimizer|rank)-[0-9]+-of-[0-9]+\.safetensors|{COPY}/.*")


def has_manifest(path: Path) -> bool:
    """Whether a save came to its end in a folder. What can't be looked into counts: it is damaged, not unfinished."""
    try:
        return (path / MANIFEST).exists()
    except PermissionError:
        return True


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a complete checkpoint and not a Hugging Face folder; damaged ones count."""
    return (path / MANIFEST).exists() and not any((path / name).is_file() for name in PRETRAINED)


def enclosing(path: Path) -> Path | None:
    """The checkpoint, or the folder of a run's checkpoints, in which a path lies or would lie; None: in neither."""
    real = path.resolve()
    return next((folder for folder in (real, *real.parents) if _holds_checkpoints(folder)), None)


def _holds_checkpoints(folder: Path) -> bool:
    itself = is_checkpoint(folder) and (folder / INDEX).is_file()
    return itself or (folder.name == "checkpoints" and bool(steps(folder, Path.is_dir)))


def needed_for_weights(name: str) -> bool:
    """Whether who wants the model alone reads this file of a checkpoint: not optimizer state nor a rank's own."""
    return not _NOT_FOR_WEIGHTS.fullmatch(name)


def steps(folder: Path, holds: Callable[[Path], bool] | None = None) -> list[int]:
    """N of every step-N in `folder` that has a manifest (or that `holds`), ascending."""
    holds = holds or has_manifest
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in found if (match := STEP.fullmatch(path.name)) and holds(path))
