"""What a checkpoint is of, and how that differs from what is running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from engines.checkpoint.manifest import CheckpointInfo, ModelFingerprint
from engines.weights import ModelFiles

IRRELEVANT = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Keys of config.json that say nothing about which weights fit."""

ABSENT = "nothing"


def fingerprint(files: ModelFiles) -> ModelFingerprint:
    """Of a model, wherever it was loaded from. Raises `ModelError` if it has no readable config.json."""
    tokenizer = files.contents.get("tokenizer.json")
    return ModelFingerprint(
        config={key: value for key, value in files.config().items() if key not in IRRELEVANT},
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(tokenizer) if tokenizer is not None else None,
    )


def compare(saved: CheckpointInfo, current: CheckpointInfo) -> list[str]:
    """What forbids to resume `current` from `saved`, a line each; empty if nothing does.

    Compared are the engine's backend, the model's config and type, the tokenizer and the optimizer's settings; not
    the layout, the device and the versions, which may change between a run and its resumption.
    """
    return [
        f"{name}: {before} in the checkpoint, {after} in this run"
        for name, before, after in _differences(_identity(saved), _identity(current))
    ]


def _identity(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "engine": info.backend,
        "model": info.model.config,
        "model_type": info.model_type,
        "vocabulary (tokenizer.json)": info.model.tokenizer_xxh3,
        "optimizer": info.optimizer,
    }


def _differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{place}.{key}" if place else key
            yield from _differences(before.get(key, ABSENT), after.get(key, ABSENT), inner)
    elif before != after:
        yield place, _shown(before), _shown(after)


def _shown(value: Any) -> str:
    return ABSENT if value in (None, ABSENT) else str(value)
