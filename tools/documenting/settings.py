"""The keys of recipes, from the settings' own classes."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic.fields import FieldInfo

from documenting.capabilities import settings_classes
from documenting.tables import table
from engines.config import EngineConfig, capability_of
from engines.recipes.reference import key_table, row


def settings_tables(which: str) -> str:
    """`recipe`: the keys that every recipe has. `plugins`: those that each engine adds under `engine:`."""
    tables = {"recipe": _recipe, "plugins": _plugins}[which]()
    return "\n".join(f"## {title}\n\n{text}" for title, text in tables.items())


def _recipe() -> dict[str, str]:
    needed = {f"engine.{key}": capability_of(info) for key, info in EngineConfig.model_fields.items()}
    return {
        _title(title, rows): _table((*one, needed.get(one[0].partition(":")[0])) for one in rows)
        for title, rows in key_table().items()
    }


def _title(meaning: str, rows: list[tuple[str, str]]) -> str:
    """`engine`: what all engines share."""
    part, dot, _ = rows[0][0].partition(".")
    return f"`{part}`: {meaning[0].lower() if meaning[1].islower() else meaning[0]}{meaning[1:]}" if dot else meaning


def _plugins() -> dict[str, str]:
    """Keys of each engine's class beside those of the class that it builds on."""
    tables = {}
    for settings, owners in settings_classes().items():
        inherited = settings.__base__.model_fields
        own = {key: info for key, info in settings.model_fields.items() if key not in inherited}
        backend = owners[0].entry.backend[0]
        where = "" if settings.__base__ is EngineConfig else f" on {', '.join(owners[0].entry.device)}"
        tables[f"What {backend} adds{where}"] = _table(_row(key, info) for key, info in own.items())
    return tables


Row = tuple[str, str, str | None]
"""Key with type and default, meaning, and the capability that it needs."""


def _row(key: str, info: FieldInfo) -> Row:
    return *row(f"engine.{key}", info), capability_of(info)


def _table(rows: Iterable[Row]) -> str:
    return table(("key", "type = default", "meaning"), (_cells(*one) for one in rows))


def _cells(key: str, meaning: str, capability: str | None) -> tuple[str, str, str]:
    name, _, kind = key.partition(": ")
    needs = f" Needs the capability `{capability}`." if capability else ""
    return f"`{name}`", kind.replace(" | ", " or "), meaning + needs
