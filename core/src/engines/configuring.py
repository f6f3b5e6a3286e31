"""From plain data to validated settings, with errors that say what to type instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from engines.config import REPLICA_SIZES, EngineConfig, ModelConfig, capability_of
from engines.errors import CapabilityError, ConfigError, did_you_mean

M = TypeVar("M", bound=BaseModel)
Others = Callable[[str], list[str]]
"""From a capability to the names of installed engines that declare it."""


def validate(model: type[M], data: Mapping[str, Any], *, where: str = "") -> M:
    """Build `model` from `data`; `where` is the dotted place of `data` in the whole, for messages.

    Raises `ConfigError` with one line per fault: the key, what is wrong, what was given, and for an unknown key
    the closest known one or the list of those that exist.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        faults = [_fault(model, fault, where) for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(faults)) from None


def _fault(model: type[BaseModel], fault: Any, where: str) -> str:
    path = [part for part in fault["loc"] if isinstance(part, str | int)]
    key = ".".join(str(part) for part in ([where] if where else []) + path)
    given = fault.get("input")
    if fault["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        hint = did_you_mean(str(path[-1]), known)
        return f"{key}: unknown key.{hint or ' Known keys: ' + ', '.join(sorted(known)) + '.'}"
    if fault["type"] == "missing":
        return f"{key}: is required, and missing"
    if fault["type"] == "model_type":
        return f"{key}: must hold keys of its own, got {given!r}"
    message = fault["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    if isinstance(given, Mapping | BaseModel) and fault["type"] == "value_error":
        return f"{key}: {message}" if key else message  # of settings in several sections: it names them itself
    hint = ""
    if fault["type"] == "string_type" and isinstance(given, int | float):
        hint = " Put it in quotes to mean the text."
    if fault["type"] in {"list_type", "tuple_type"} and isinstance(given, str | int | float):
        hint = f" Write [{given}]."
    if fault["type"] == "literal_error" and isinstance(given, str):
        hint = did_you_mean(given, _literals(model, path))
    return f"{key}: {message[:1].lower()}{message[1:]}, got {given!r}.{hint}"


def _known_keys(model: type[BaseModel], path: list[Any]) -> list[str]:
    found = _model_at(model, path)
    return list(found.model_fields) if found else []


def _model_at(model: type[BaseModel], path: list[Any]) -> type[BaseModel] | None:
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            inner = _inner_model(model.model_fields[part].annotation)
            if inner is None:
                return None
            model = inner
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _inner_model(arg))), None)


def _literals(model: type[BaseModel], path: list[Any]) -> list[str]:
    *place, name = [part for part in path if isinstance(part, str)]
    owner = _model_at(model, place)
    return _words(owner.model_fields[name].annotation) if owner is not None and name in owner.model_fields else []


def _words(annotation: Any) -> list[str]:
    """Every string that a Literal in the annotation allows, also inside of a list or a union."""
    if isinstance(annotation, str):
        return [annotation]
    return [word for argument in get_args(annotation) for word in _words(argument)]


def check_capabilities(
    config: EngineConfig,
    model: ModelConfig,
    *,
    engine: str,
    capabilities: frozenset[str],
    others: Others,
    switches: Mapping[str, str] | None = None,
) -> None:
    """Refuse settings that the engine doesn't declare, before anything starts.

    `engine`: how to call it in messages; `others(capability)`: names of installed engines that declare it.
    `switches`: what else is switched on, each with the capability that it needs. Raises `CapabilityError` with one
    line per refused setting.
    """
    faults = []
    for name, info in type(config).model_fields.items():
        capability = capability_of(info)
        value = getattr(config, name)
        if capability is not None and capability not in capabilities and value != info.default:
            faults.append(f"engine.{name}: {value!r} {lack(capability, engine, others)}. Use {info.default!r}.")
    if model.dtype == "bfloat16" and "bfloat16" not in capabilities:
        faults.append(f"model.dtype: 'bfloat16' {lack('bfloat16', engine, others)}. Use 'float32'.")
    for name, capability in (switches or {}).items():
        if capability not in capabilities:
            faults.append(f"{name}: True {lack(capability, engine, others)}. Use False.")
    if faults:
        raise CapabilityError("\n".join(faults))


def check_processes(
    config: EngineConfig, world_size: int, *, engine: str, capabilities: frozenset[str], others: Others
) -> None:
    """Refuse more processes than a replica has where the engine gives all ranks the same samples.

    To be called after `EngineConfig.check`, which knows that replicas divide the processes. Raises `CapabilityError`.
    """
    replica = math.prod(getattr(config, name) for name in REPLICA_SIZES)
    if world_size > replica and "data_parallel" not in capabilities:
        raise CapabilityError(
            f"{world_size} processes, {replica} to a replica of the model: to train replicas on different samples "
            f"{lack('data_parallel', engine, others)}",
            f"Start {replica} process{'es' if replica > 1 else ''} (launch.nproc).",
        )


def lack(capability: str, engine: str, others: Others) -> str:
    """`needs the capability ..., which ... lacks (...)`: to be put behind what asks for it."""
    able = others(capability)
    where = f"engines that have it: {', '.join(able)}" if able else "no installed engine has it"
    return f"needs the capability {capability}, which {engine} lacks ({where})"
