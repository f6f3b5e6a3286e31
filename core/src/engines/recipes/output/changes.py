"""What is asked for now beside what a folder's run was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def changed_settings(file: Path, recipe: Mapping[str, Any]) -> list[str]:
    """A line for each setting that is another in the recipe.yaml `file` and in `recipe`, which is resolved."""
    import yaml

    if not file.is_file():
        return []
    try:
        held = yaml.safe_load(file.read_bytes()) or {}
    except OSError as error:
        return [f"  (unknown: {file} can't be read: {error.strerror})"]
    except (yaml.YAMLError, UnicodeDecodeError):
        held = None
    if not isinstance(held, Mapping):
        return [f"  (unknown: {file} is damaged)"]
    before, now = (dict(flat(tree)) for tree in (held, recipe))
    keys = [*now, *(key for key in before if key not in now)]
    return [
        f"  {key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in keys if before.get(key) != now.get(key)
    ]


def changed_data(run: Path, recipe: Mapping[str, Any]) -> list[str]:
    """A line for each data file that is younger than run.json, written last: all that is known without reading it."""
    named = {f"data.{key}": recipe.get("data", {}).get(key) for key in ("train", "eval")}
    files = {key: Path(name).expanduser() for key, name in named.items() if name is not None}
    return [f"  {key}: {file}" for key, file in files.items() if file.exists() and _written(file) > _written(run)]


def _written(file: Path) -> float:
    return file.stat().st_mtime


def flat(tree: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a recipe."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value
