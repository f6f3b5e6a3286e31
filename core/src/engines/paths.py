"""What a file or folder can be called."""

from __future__ import annotations

import os

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes, of all file systems in use."""


def why_no_path(path: str) -> str | None:
    """Why nothing on a disk can be called that; None: it can."""
    name = max(os.fsencode(path).split(b"/"), key=len)
    if not path.strip():
        return "must name a path"
    if "\0" in path or len(name) > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
        return f"no file can be called that: a name has at most {LONGEST_NAME} bytes, none of them 0"
    if path.startswith("~") and os.path.expanduser(path) == path:
        return f"there is no user {path[1:].partition('/')[0]!r}"
    return None
