"""A new plugin on the disk."""

from __future__ import annotations

from pathlib import Path

from engines.errors import ConfigError
from engines.registry import Registry
from engines.scaffold.naming import Names, check_names
from engines.scaffold.rendering import render


def new_plugin(names: Names, folder: Path, registry: Registry) -> Path:
    """Make the distribution's folder in `folder`; returns it.

    Raises ConfigError if it is there already, or a name can't be had.
    """
    check_names(names, registry)
    made = folder / names.distribution
    try:
        made.mkdir()
    except FileExistsError:
        raise ConfigError(f"{made} exists already.", "Choose another name, or remove it.") from None
    for path, text in render(names).items():
        file = made / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return made
