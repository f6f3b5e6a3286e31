"""The keys of a recipe as a table, made from the settings' own classes."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engines.recipes.sft.config import SFTRecipe


def key_table(recipe: type[BaseModel] = SFTRecipe) -> dict[str, list[tuple[str, str]]]:
    """Sections of rows (key with type and default, meaning); the recipe's own keys first."""
    own = [row(name, info) for name, info in recipe.model_fields.items() if _inner(info) is None]
    sections = {"Recipe": own}
    for name, info in recipe.model_fields.items():
        inner = _inner(info)
        if inner is not None:
            rows = [row(f"{name}.{key}", field) for key, field in inner.model_fields.items()]
            sections[_first_sentence(inner)] = rows
    return sections


def row(key: str, info: FieldInfo) -> tuple[str, str]:
    """A key as a row of the table."""
    default = "" if info.is_required() else f" = {_shown(info.default)}"
    meaning = " ".join((info.description or "").split())
    return f"{key}: {type_name(info.annotation)}{default}", meaning


def type_name(annotation: Any) -> str:
    """A type as people write it: int, null, a | b."""
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(inner) for inner in get_args(annotation))
    if origin is tuple:
        inner = list(dict.fromkeys(type_name(part) for part in get_args(annotation) if part is not ...))
        return f"[{', '.join(inner)}, ...]"
    if hasattr(annotation, "__metadata__"):
        return type_name(get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    return {str: "string", float: "number"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _inner(info: FieldInfo) -> type[BaseModel] | None:
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _first_sentence(model: type[BaseModel]) -> str:
    text = " ".join((model.__doc__ or model.__name__).split())
    return text.partition(". ")[0].rstrip(".")


def _shown(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)
