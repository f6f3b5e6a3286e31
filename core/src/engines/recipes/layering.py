"""Recipe files and `key=value` overrides, laid over each other from left to right.

Relative paths in a recipe, and on the command line, are relative to the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engines.errors import ConfigError, EnginesError, did_you_mean

_KEY: Final = r"[A-Za-z_][\w.\[\]]*"
_OVERRIDE: Final = re.compile(rf"{_KEY}=")
_KINDS: Final = {list: "a list", int: "a number", float: "a number", bool: "true or false"}
_SPELT: Final = "Overrides are spelt KEY=VALUE, without spaces"


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipe files and overrides among the command's arguments; each kind keeps its order."""
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    files = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    return files, overrides


def read_layers(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Plain nested data of `files`, later ones over earlier ones, and `overrides` over all of them.

    Raises `ConfigError` for a file that is missing or not YAML, for an override that isn't `KEY=VALUE`, and for
    an interpolation (`${...}`) that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    layers = [(str(file), _read_file(Path(file))) for file in files]
    layers += [(override, _read_override(override)) for override in overrides]
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


def _read_override(override: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from engines.recipes.yaml_text import read_yaml

    key, _, text = override.partition("=")
    if "[" in key:
        name = key.partition("[")[0]
        raise ConfigError(f"{override}: an override sets a list as a whole", f"Write {name}=[...], all of it.")
    layer = OmegaConf.create({})
    try:
        OmegaConf.update(layer, key, read_yaml(text, override))
    except EnginesError:
        raise
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"{override}: {_first_line(error)}", f"{_SPELT}; VALUE is YAML.") from None
    return layer


def _read_file(file: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from engines.recipes.yaml_text import read_yaml

    if file.is_dir():
        raise ConfigError(f"{file} is a folder, not a recipe file")
    if not file.is_file():
        raise _no_file(file)
    try:
        data = read_yaml(file.read_text("utf-8"), str(file))
        if data is not None and not isinstance(data, dict):
            raise ConfigError(f"{file} holds {_KINDS.get(type(data), 'a word')}, not the keys of a recipe")
        _refuse_dots(data or {}, file)
        return OmegaConf.create(data or {})
    except EnginesError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from None
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from None
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None


def _refuse_dots(data: dict[Any, Any], file: Path) -> None:
    for name in map(str, data):
        section, dot, key = name.partition(".")
        if dot:
            raise ConfigError(
                f"{file}: {name}: only overrides have dots", f"In a file write {section}: {{{key}: ...}}."
            )


def _no_file(file: Path) -> ConfigError:
    """A mistyped file, or an override that lacks its value."""
    others = sorted(path.name for path in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
    if re.fullmatch(_KEY, str(file)) and file.suffix not in {".yaml", ".yml"}:
        hint = did_you_mean(file.name, others)
        return ConfigError(f"{file} is neither a recipe file nor KEY=VALUE.{hint}", f"{_SPELT}: {file}=VALUE.")
    found = f"{file.parent} holds {', '.join(others)}." if others else None
    return ConfigError(f"there is no recipe file {file}", found)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
