"""What `model.path` may name: a checkpoint that weights can be loaded from, and what to say of others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engines.checkpoint_folder.faults import fault
from engines.checkpoint_folder.manifest import CheckpointInfo, Manifest, read_manifest
from engines.checkpoint_folder.names import (
    COPY,
    MANIFEST,
    PIECES,
    PRETRAINED,
    is_checkpoint,
    needed_for_weights,
    steps,
)
from engines.errors import CheckpointError, EnginesError, ModelError


def look(path: Path) -> CheckpointInfo:
    """Read a checkpoint's manifest; see that the files needed for its weights have their sizes.

    What belongs to the model (config, tokenizer, ...) is small, and read before torch is there: its checksums are
    compared too. Those of the weights are compared when these are loaded. Raises `CheckpointError` naming the file.
    """
    manifest = read_manifest(path)
    check_held(path, manifest, ["model"])
    for name, record in manifest.files.items():
        if needed_for_weights(name):
            found = fault(path / name, record, checksum=not name.endswith(".safetensors"))
            if found is not None:
                raise CheckpointError(found)
    return manifest.info


def check_held(path: Path, manifest: Manifest, parts: Iterable[str]) -> None:
    """Raise `CheckpointError` unless the tensors of `parts` are in the checkpoint at `path`."""
    absent = sorted(set(parts) - set(manifest.contents))
    if absent:
        copy = f"Its Hugging Face copy is {path / COPY}." if "huggingface" in manifest.held else None
        held = ", ".join(manifest.held) or "nothing"
        raise CheckpointError(f"{path} holds {held}, but not {', '.join(absent)}", copy)


def why_no_model(path: Path) -> EnginesError | None:
    """What to say about a folder that no model can be loaded from, though it has to do with checkpoints.

    None for a Hugging Face folder, for a checkpoint that is complete, and for a folder of something else.
    """
    if any((path / name).is_file() for name in PRETRAINED):
        return None
    if is_checkpoint(path):
        return None if (path / "config.json").is_file() else _why_no_config(path)
    if any(next(path.glob(pattern), None) for pattern in PIECES):
        return CheckpointError(
            f"model.path: {path} is not a complete checkpoint: it has no {MANIFEST}", latest(path.parent)
        )
    for folder in (path, path / "checkpoints") if not (path / "config.json").is_file() else ():
        if steps(folder, Path.is_dir):
            export = f" Its export is {path / 'export'}." if (path / "export/config.json").is_file() else ""
            return ModelError(f"model.path: {path} holds checkpoints; name one of them", latest(folder) + export)
    return None


def latest(folder: Path) -> str:
    """A sentence about the latest checkpoint in a folder of them whose weights are whole."""
    complete = steps(folder, _is_whole)
    if not complete:
        return f"{folder} holds no complete checkpoint."
    return f"The latest complete one is {folder / f'step-{complete[-1]}'}."


def _why_no_config(checkpoint: Path) -> CheckpointError:
    try:
        look(checkpoint)
    except CheckpointError as error:
        return error
    return CheckpointError(
        f"model.path: {checkpoint} is a checkpoint without config.json, as engines-core wrote them once:"
        " its own run can be resumed from it, but no other can start from it",
        "Go on with its run for a step, and name the checkpoint that this saves; or name the run's export.",
    )


def _is_whole(path: Path) -> bool:
    try:
        look(path)
    except CheckpointError:
        return False
    return True
