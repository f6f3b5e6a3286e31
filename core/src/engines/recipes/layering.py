"""Recipe files and `key=value` overrides, laid over each other from left to right.

Relative paths in a recipe, and on the command line, are relative to the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.errors import ConfigError

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]]*=")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipe files and overrides among the command's arguments; each kind keeps its order."""
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    files = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    return files, overrides


def read_layers(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plain nested data of `files`, later ones over earlier ones, and `overrides` over all of them.

    Raises `ConfigError` for a file that is missing or not YAML, for an override that isn't `key=value`, and for
    an interpolation (`${...}`) that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    layers = [(str(file), _read_file(Path(file))) for file in files]
    for override in overrides:
        try:
            layers.append((override, OmegaConf.from_dotlist([override])))
        except (OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(f"{override}: {_first_line(error)}", "Overrides are spelt key=value.") from None
    whole: Any = OmegaConf.create({})
    for name, layer in layers:
        try:
            whole = OmegaConf.merge(whole, layer)
        except TypeError:
            raise ConfigError(f"{name}: a list and keys of one's own can't be laid over each other") from None
        except OmegaConfBaseException as error:
            raise ConfigError(f"{name}: {_first_line(error)}") from None
    try:
        merged = OmegaConf.to_container(whole, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{', '.join(map(str, files))}: {_first_line(error)}") from None
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _read_file(file: Path) -> Any:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if file.is_dir():
        raise ConfigError(f"{file} is a folder, not a recipe file")
    if not file.is_file():
        others = sorted(path.name for path in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        found = f"{file.parent} holds {', '.join(others)}." if others else None
        raise ConfigError(f"there is no recipe file {file}", found)
    try:
        layer = OmegaConf.load(file)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from None
    except (YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{file} holds a list, not the keys of a recipe")
    return layer


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
