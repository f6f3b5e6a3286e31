"""The config.json of a Hugging Face model folder or a checkpoint, read without torch."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engines.checkpoint_folder import PRETRAINED, is_checkpoint, why_no_model
from engines.errors import ModelError

CONFIG = "config.json"

COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "additional_chat_templates",
    "*processor_config.json",
    "*.py",
)
"""What a model folder holds beside config and weights, and transformers may need to load it."""

_OF_AN_EXPORT = (CONFIG, *PRETRAINED, "model-*-of-*.safetensors", *COMPANIONS)


def read_config(folder: str | Path) -> dict[str, Any]:
    """A model folder's, or a checkpoint's, config.json. Raises `ModelError` or `CheckpointError` if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"model.path: there is no folder {folder}", _neighbours(folder))
    file = folder / CONFIG
    if not file.is_file():
        raise why_no_model(folder) or ModelError(
            f"model.path: {folder} holds no {CONFIG}, so it is not a Hugging Face model folder"
        )
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file of a model folder that must hold an object. Raises `ModelError` if it doesn't."""
    return parse_object(file.read_bytes(), file)


def parse_object(contents: bytes, file: Path) -> dict[str, Any]:
    """The JSON object that `file` held when its `contents` were read. Raises `ModelError` if it isn't one."""
    try:
        data = json.loads(contents.decode())  # UTF-8 without a mark, as transformers reads it
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{file} is not JSON: {cause}") from cause
    if not isinstance(data, dict):
        raise ModelError(f"{file} holds {type(data).__name__}, not an object")
    return data


def why_not_replaced(folder: Path) -> str | None:
    """What an export in place of `folder` would delete that no export wrote; None: nothing, or there is no folder."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is a file"
    if is_checkpoint(folder):
        return f"{folder} is a checkpoint, which an export would replace"
    names = sorted(path.name for path in folder.iterdir())
    if names and CONFIG not in names:
        return f"{folder} holds files, but no model that an export could replace"
    others = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _OF_AN_EXPORT)]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        return f"{folder} holds {', '.join(others[:5])}{more} beside a model, which an export would delete"
    return None


def _neighbours(folder: Path) -> str | None:
    names = sorted(path.name for path in folder.parent.iterdir()) if folder.parent.is_dir() else []
    return f"{folder.parent} holds {', '.join(names[:8])}." if names else None
