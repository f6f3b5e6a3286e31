"""What somebody wants to have verified."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engines.errors import ConfigError, did_you_mean
from engines.testing.layouts import LAYOUTS, Layout

AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """The options of `engines verify`."""

    engines: tuple[str, ...] = ()
    """`backend` or `backend@distribution`; none: all that can run on the device."""
    against: str | None = None
    """The engine that the others are compared with; None: the reference engine."""
    device: str | None = None
    """None: `ENGINES_DEVICE`, else the cpu, and for named engines that don't run there the best that is present."""
    model: Path | None = None
    """A model folder or checkpoint; None: tiny models with random weights."""
    layouts: tuple[str, ...] | None = None
    """Their names; None: all that an engine declares."""
    steps: int = 3


def split_layouts(words: str) -> tuple[str, ...] | None:
    """`auto`, or names with commas between them. Raises `ConfigError` where there are none."""
    names = tuple(dict.fromkeys(word for word in (" ".join(part.split()) for part in words.split(",")) if word))
    if not names:
        raise ConfigError("--layouts: no layout is named", f"Write {AUTO}, or names as in --layouts single,tp2.")
    return None if names == (AUTO,) else names


def check_layouts(names: Collection[str], declared: Collection[Layout]) -> dict[str, Layout]:
    """The layouts with these names, core's own and those `declared`. Raises `ConfigError` for a name without one."""
    known = {layout.name: layout for layout in (*LAYOUTS, *declared)}
    faults = [f'There is no layout "{name}".{did_you_mean(name, known)}' for name in names if name not in known]
    if faults:
        raise ConfigError("\n".join(faults), f"Known: {AUTO}, or any of {', '.join(known)}.")
    return {name: known[name] for name in names}
