"""Files that `engines new mychip --device mychip` makes."""

from __future__ import annotations

from pathlib import Path

from documenting.sources import fenced
from engines.scaffold import Names, render

NAMES = Names("mychip", device="mychip")


def scaffold(path: str, until: str = "") -> str:
    """One of the files, up to the line `until`."""
    text = render(NAMES)[path]
    assert until in text, f"{path} has no line {until}"
    shown = text.partition(f"\n{until}\n")[0] if until else text
    return fenced(shown, Path(path).suffix, title=path)
