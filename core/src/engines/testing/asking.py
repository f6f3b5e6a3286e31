"""What a user can ask for that only some engines do: settings and calls, by the capability that they need."""

from __future__ import annotations

from typing import Any

from engines.capabilities import CAPABILITIES
from engines.config import EngineConfig, capability_of

CALLS = frozenset({"bfloat16", "data_parallel", "deterministic", "entropy", "export", "lora", "offload"})
"""Capabilities that something else than a setting of `engine:` asks for; a chapter of the kit knows what."""


def settings_that_need(capability: str, config: type[EngineConfig]) -> dict[str, Any]:
    """Settings of `engine:` that need it, each with a value that isn't its default.

    Core's fields count as core has them, whatever `config` makes of them; its own if they are numbers, or true or
    false.
    """
    fields = {**config.model_fields, **EngineConfig.model_fields}
    found = {}
    for name, info in fields.items():
        if capability_of(info) == capability and type(info.default) in OTHER:
            found[name] = OTHER[type(info.default)](info.default)
    return found


OTHER: dict[type, Any] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
}


def can_be_asked_for(config: type[EngineConfig]) -> frozenset[str]:
    """The capabilities that there is a setting or a call for, which an engine without them must refuse; a vendor's
    own among them.
    """
    named = {word for info in config.model_fields.values() if (word := capability_of(info))}
    return CALLS | {word for word in CAPABILITIES.keys() | named if settings_that_need(word, config)}
