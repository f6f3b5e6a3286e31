"""A checkpoint as its manifest and the sizes of its files tell it: a look that needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engines.errors import CheckpointError, EnginesError, ModelError

MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
STEP: Final = re.compile(r"step-(0|[1-9][0-9]*)")
PRETRAINED: Final = ("model.safetensors", "model.safetensors.index.json")
"""Either holds, or lists, the weights of a Hugging Face folder; no checkpoint has a file of these names."""

_PIECES: Final = ("rank-*-of-*.safetensors", "optimizer-*-of-*.safetensors")
_NOT_FOR_WEIGHTS: Final = re.compile(r"(optimizer|rank)-[0-9]+-of-[0-9]+\.safetensors")


@dataclass(frozen=True)
class CheckpointFolder:
    """What the manifest of a checkpoint says about it."""

    path: Path
    step: int
    """Optimizer steps done."""
    backend: str
    """The engine that saved it."""


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a complete checkpoint and not a Hugging Face folder; damaged ones count."""
    return (path / MANIFEST).is_file() and not any((path / name).is_file() for name in PRETRAINED)


def needed_for_weights(name: str) -> bool:
    """Whether who wants the model alone reads this file of a checkpoint: not optimizer state nor a rank's own."""
    return not _NOT_FOR_WEIGHTS.fullmatch(name)


def look(path: Path) -> CheckpointFolder:
    """Read a checkpoint's manifest; see that the files needed for its weights have their sizes.

    What belongs to the model (config, tokenizer, ...) is small, and read before torch is there: its checksums are
    compared too. Those of the weights are compared when these are loaded. Raises `CheckpointError` naming the file.
    """
    manifest = _read(path / MANIFEST)
    try:
        info, files = manifest["info"], manifest["files"]
        found = CheckpointFolder(path, int(info["step"]), str(info["backend"]))
        records = {name: (int(one["size"]), str(one["xxh3"])) for name, one in files.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it is not a checkpoint's manifest") from None
    for name, (size, digest) in records.items():
        if needed_for_weights(name):
            _check(path / name, size, None if name.endswith(".safetensors") else digest)
    return found


def checksum(manifest: dict[str, Any]) -> str:
    """What a manifest, without it, has as `xxh3`."""
    import xxhash

    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def steps(folder: Path, holds: Callable[[Path], bool] | None = None) -> list[int]:
    """N of every step-N in `folder` that has a manifest (or that `holds`), ascending."""
    holds = holds or (lambda path: (path / MANIFEST).is_file())
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in found if (match := STEP.fullmatch(path.name)) and holds(path))


def why_no_model(path: Path) -> EnginesError | None:
    """What to say about a folder that no model can be loaded from, though it has to do with checkpoints.

    None for a Hugging Face folder, for a checkpoint that is complete, and for a folder of something else.
    """
    if any((path / name).is_file() for name in PRETRAINED):
        return None
    if is_checkpoint(path):
        return None if (path / "config.json").is_file() else _why_no_config(path)
    if any(next(path.glob(pattern), None) for pattern in _PIECES):
        return CheckpointError(
            f"model.path: {path} is not a complete checkpoint: it has no {MANIFEST}", latest(path.parent)
        )
    for folder in (path, path / "checkpoints") if not (path / "config.json").is_file() else ():
        if steps(folder, Path.is_dir):
            export = f" Its export is {path / 'export'}." if (path / "export/config.json").is_file() else ""
            return ModelError(f"model.path: {path} holds checkpoints; name one of them", latest(folder) + export)
    return None


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


def latest(folder: Path) -> str:
    """A sentence about the latest checkpoint in a folder of them that is whole."""
    complete = steps(folder, _is_whole)
    if not complete:
        return f"{folder} holds no complete checkpoint."
    return f"The latest complete one is {folder / f'step-{complete[-1]}'}."


def _is_whole(path: Path) -> bool:
    try:
        look(path)
    except CheckpointError:
        return False
    return True


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except OSError:
        raise CheckpointError(f"{file} is missing") from None
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{file} is damaged: it is not JSON: {cause}") from None
    if not isinstance(data, dict) or data.pop("xxh3", None) != checksum(data):
        raise CheckpointError(f"{file} is damaged: its checksum is not that of its contents")
    return data


def _check(file: Path, size: int, digest: str | None) -> None:
    import xxhash

    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    if file.stat().st_size != size:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {size} were written")
    if digest is not None and xxhash.xxh3_128_hexdigest(file.read_bytes()) != digest:
        raise CheckpointError(f"{file} has changed since it was written: its checksum is another")
