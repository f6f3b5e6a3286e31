"""The keys of `engine.toml`, from the classes that validate it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from documenting.tables import table
from engines.manifest import DeviceEntry, EngineEntry, Manifest

TABLES: dict[str, type[BaseModel]] = {
    "At the top": Manifest,
    "`[[engine]]`": EngineEntry,
    "`[[device]]`": DeviceEntry,
}


def manifest_tables() -> str:
    """A table for each of the manifest's, with every key."""
    return "\n".join(f"### {title}\n\n{_table(model)}" for title, model in TABLES.items())


def _table(model: type[BaseModel]) -> str:
    return table(
        ("key", "default", "meaning"),
        ((f"`{name}`", default(info), _meaning(info)) for name, info in model.model_fields.items()),
    )


def default(info: FieldInfo) -> str:
    """A key's default, or that it is required."""
    value: Any = info.default
    if value is PydanticUndefined:
        return "required"
    return "none" if value in (None, (), {}) else str(value)


def _meaning(info: FieldInfo) -> str:
    return info.description or "any number of tables"
