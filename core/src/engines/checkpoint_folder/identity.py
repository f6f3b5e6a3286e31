"""What a checkpoint is of, and how that differs from what is running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engines.checkpoint_folder.manifest import CheckpointInfo, Manifest, ModelFingerprint
from engines.errors import CheckpointError

IRRELEVANT = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Keys of config.json that say nothing about which weights fit."""

ABSENT = "nothing"


def fingerprint(config: Mapping[str, Any], tokenizer: bytes | None) -> ModelFingerprint:
    """Of a model, wherever it was loaded from: its config.json, and the contents of its tokenizer.json."""
    import xxhash

    return ModelFingerprint(
        config={key: value for key, value in config.items() if key not in IRRELEVANT},
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(tokenizer) if tokenizer is not None else None,
    )


def compare(saved: CheckpointInfo, current: CheckpointInfo) -> list[str]:
    """What forbids to resume `current` from `saved`, a line each; empty if nothing does.

    Compared are the engine's backend, the model's config and type, the tokenizer and the optimizer's settings; not
    the layout, the device and the versions, which may change between a run and its resumption.
    """
    return differences(identity(saved), identity(current))


def check_goes_on(path: Path, manifest: Manifest, *, trains: bool = True) -> None:
    """Raise `CheckpointError` for a checkpoint that was saved without what its run, if it `trains`, needs to go on.

    An optimizer whose settings were saved has no tensors before its first step.
    """
    held = {*manifest.held, *(["optimizer"] if manifest.info.optimizer is not None or not trains else [])}
    lacking = [content for content in ("model", "optimizer", "state") if content not in held]
    if lacking:
        raise CheckpointError(
            f"{path} holds {', '.join(manifest.held) or 'nothing'}, but not {' and '.join(lacking)}:"
            " no run can go on from it (trainer.checkpoint_contents)",
            "Start another run with its weights: name it as model.path, with another trainer.output_dir.",
        )


def identity(info: CheckpointInfo) -> dict[str, Any]:
    """What a run and its resumption have in common, by the names that users know."""
    return {
        "engine": info.backend,
        "model": info.model.config,
        "model_type": info.model_type,
        "vocabulary (tokenizer.json)": info.model.tokenizer_xxh3,
        "optimizer": info.optimizer,
    }


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs, by its dotted place."""
    return [
        f"{place}: {before} in the checkpoint, {after} in this run"
        for place, before, after in _differences(saved, current)
    ]


def _differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{place}.{key}" if place else key
            yield from _differences(before.get(key, ABSENT), after.get(key, ABSENT), inner)
    elif before != after:
        null = "null" if ABSENT in (before, after) else ABSENT  # a key that is null is not one that is missing
        yield place, _shown(before, null), _shown(after, null)


def _shown(value: Any, null: str) -> str:
    return null if value is None else str(value)
