"""Everything that others build on, as one readable text: a change of it shows as a difference in review."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pydantic import BaseModel

import engines
from documenting.commands import every_command, help_text
from documenting.manifest import TABLES, default
from engines import contract
from engines.capabilities import CAPABILITIES
from engines.config import EngineConfig, ModelConfig, OptimizerConfig
from engines.engine.binding import HOOKS
from engines.recipes.reference import key_table, row

HEAD = """\
What others build on. Written by `make docs`; a test compares it to the code. Whoever changes a line of it changes
the contract with users and authors, and says so in CHANGELOG.md.
"""
DATA = ("Ranks", "MicroBatchRules", "MicroResult", "StepResult", "Shard", "ExportPlan", "EngineContext")
PROTOCOLS = ("BoundLoss", "ShardReader")


def public_api() -> str:
    """The whole text."""
    sections = {
        "import engines": list(engines.__all__),
        "BaseEngine, its hooks": [f"{name}{_signature(hook)}{_needed(hook)}" for name, hook in HOOKS.items()],
        "BaseEngine, its data": [f"{name}: {kind}" for name, kind in contract.BaseEngine.__annotations__.items()],
        **{f"engines.contract.{name}": list(_fields(getattr(contract, name))) for name in DATA},
        **{f"engines.contract.{name}": list(_members(getattr(contract, name))) for name in PROTOCOLS},
        **{name: list(_members(getattr(engines, name))) for name in ("Engine", "TrainingWorker", "Batch", "Loss")},
        "Functions": [f"{name}{_signature(getattr(engines, name))}" for name in ("create", "auto_select")],
        "engines.TokenOutputs": list(_fields(engines.TokenOutputs)),
        **{one.__name__: list(_settings(one)) for one in (ModelConfig, OptimizerConfig, EngineConfig)},
        "A recipe's keys": [key for rows in key_table().values() for key, _ in rows],
        **{f"engine.toml, {title}": list(_keys(model)) for title, model in TABLES.items()},
        "Capabilities": list(CAPABILITIES),
        "Errors": list(_errors(import_module("engines.errors").EnginesError)),
        **{f"$ {ctx.command_path} --help": help_text(ctx).splitlines() for ctx in every_command()},
    }
    return HEAD + "".join(f"\n{title}\n{_indented(lines)}" for title, lines in sections.items())


def _indented(lines: list[str]) -> str:
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


class _AsWritten(str):
    """An annotation that is shown as it stands in the source."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(function: Any) -> str:
    return str(_as_written(function))


def _as_written(function: Any) -> inspect.Signature:
    found = inspect.signature(function)
    parameters = [
        one.replace(annotation=_AsWritten(one.annotation)) if isinstance(one.annotation, str) else one
        for one in found.parameters.values()
    ]
    returned = found.return_annotation
    return found.replace(
        parameters=parameters, return_annotation=_AsWritten(returned) if isinstance(returned, str) else returned
    )


def _needed(hook: Any) -> str:
    return f"  # only with the capability {hook.__engines_capability__}" if hook.__engines_capability__ else ""


def _members(owner: type) -> Iterator[str]:
    """Public attributes and methods, in the order in which they are written."""
    for name, kind in inspect.get_annotations(owner).items():
        if not name.startswith("_"):
            yield f"{name}: {kind}"
    protocol = getattr(owner, "_is_protocol", False)
    for name, member in vars(owner).items():
        if (name == "__init__" and not protocol) or not name.startswith("_"):
            if isinstance(member, property):
                yield f"{name} -> {inspect.signature(member.fget).return_annotation}"
            elif isinstance(member, classmethod):
                yield f"classmethod {name}{_signature(member.__func__)}"
            elif inspect.isfunction(member):
                yield f"{name}{_signature(member)}"


def _fields(owner: type) -> Iterator[str]:
    for parameter in _as_written(owner).parameters.values():
        yield str(parameter).replace("<built-in function sum>", "sum")


def _settings(owner: type[BaseModel]) -> Iterator[str]:
    for name, info in owner.model_fields.items():
        yield row(name, info)[0]


def _keys(owner: type[BaseModel]) -> Iterator[str]:
    for name, info in owner.model_fields.items():
        yield f"{name} = {default(info)}"


def _errors(owner: type, depth: int = 0) -> Iterator[str]:
    yield "  " * depth + owner.__name__
    for one in sorted(owner.__subclasses__(), key=lambda one: one.__name__):
        if one.__module__ == owner.__module__:
            yield from _errors(one, depth + 1)
