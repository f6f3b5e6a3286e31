"""JSON that comes back as it went in, and errors that name the file."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from engines.errors import CheckpointError


def encode(value: Any, *, what: str, indent: int | None = None) -> bytes:
    """`value` as JSON. Raises TypeError, naming `what`, if reading it back would give anything else.

    That is so for tuples, keys that aren't strings, NaN and infinity.
    """
    try:
        text = json.dumps(value, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as cause:
        raise TypeError(f"{what} must hold JSON values only: {cause}") from cause
    changed = _changed(value, json.loads(text))
    if changed is not None:
        raise TypeError(f"{what} must hold JSON values only; JSON would change {changed}")
    return text.encode()


def read(file: Path) -> Any:
    """The contents of a JSON file. Raises `CheckpointError` if it can't be read, or isn't clearly JSON."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{file} is damaged: it is not a regular file")
        return json.loads(file.read_bytes(), object_pairs_hook=_object)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as cause:
        raise CheckpointError(f"{file} can't be read: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{file} is not JSON: {cause}") from cause


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key nobody could say which is meant."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it holds {json.dumps(twice)} twice")
    return members


def _changed(before: Any, after: Any, place: str = "") -> str | None:
    """The first place where the two differ in type or value."""
    if isinstance(before, dict):
        if list(before) != list(after):
            return f"the keys {list(before)} at {place or 'the top'}"
        pairs = [(f"{place}.{key}".lstrip("."), before[key], after[key]) for key in before]
    elif isinstance(before, list):
        pairs = [(f"{place}[{i}]", *items) for i, items in enumerate(zip(before, after, strict=True))]
    elif type(before) is type(after) and before == after:
        return None
    else:
        return f"{before!r} at {place or 'the top'}"
    return next((found for where, a, b in pairs if (found := _changed(a, b, where))), None)
