"""MindSpeed's arguments: one set in a process, so engines with equal ones share it by reference count.

`repatch` takes all patches out and puts those in that the arguments ask for. What holds a function of Megatron by
then keeps the old one, so it is called before Megatron's groups are made and its modules built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from engines.errors import ConfigError, LaunchError, did_you_mean
from engines_mindspeed.config import OWNERS, Argument
from engines_mindspeed.foreign import FRESH, call
from engines_mindspeed.guard import ADAPTOR
from engines_mindspeed.patches import ATTENTION, attention_is_mindspeeds, unpatched

Arguments = dict[str, Argument]


@dataclass
class _Held:
    """The arguments that this process's MindSpeed has."""

    arguments: Arguments
    engines: int = 0


_held: list[_Held] = []
"""One at most."""
_given: set[str] = set()
"""Every argument that was ever given here: MindSpeed keeps its value where it isn't given again."""


def acquire(arguments: Arguments) -> None:
    """Patch Megatron-Core for these arguments, or share those of a living engine; `release` once for each call.

    Called before Megatron's groups are made. Raises `ConfigError` for an argument that MindSpeed doesn't have, or
    other ones than a living engine's; `LaunchError` if MindSpeed doesn't do what they ask for.
    """
    if not _held:
        _check_names(arguments)
        _repatch(arguments)
        _held.append(_Held(dict(arguments)))
    (held,) = _held
    if held.arguments != arguments:
        raise ConfigError(
            "a megatron engine with other arguments of MindSpeed lives in this process: "
            f"{_differences(held.arguments, arguments)}. MindSpeed patches Megatron-Core for one set",
            "close the first one, give both the same settings, or place them in separate processes",
        )
    held.engines += 1


def release() -> None:
    """Give up one engine's share; the last one leaves the patches in, and the next may bring other arguments."""
    assert _held, "released more often than acquired"
    (held,) = _held
    held.engines -= 1
    if held.engines == 0:
        _held.clear()


def _check_names(arguments: Arguments) -> None:
    known = vars(
        call("reading MindSpeed's arguments", lambda: import_module("mindspeed.args_utils").get_mindspeed_args(True))
    )
    for name in sorted(arguments.keys() - known.keys() - OWNERS.keys()):
        raise ConfigError(
            f"engine.mindspeed.{name}: MindSpeed has no such argument.{did_you_mean(name, known)}",
            "write its name as in MindSpeed's documentation, with underscores and without leading dashes",
        )
    kept = sorted(_given - arguments.keys())
    if kept:
        raise ConfigError(
            f"an earlier engine of this process gave MindSpeed {', '.join(kept)}, which it keeps",
            f"give {', '.join(kept)} again under engine.mindspeed, or start a fresh process",
        )


def _repatch(arguments: Arguments) -> None:
    _given.update(arguments)
    call("MindSpeed's repatch", lambda: import_module(ADAPTOR).repatch(dict(arguments)))
    faults = unpatched()
    if arguments["use_flash_attn"] and not attention_is_mindspeeds():
        faults.append(f"{ATTENTION}.DotProductAttention is Megatron's own, in spite of use_flash_attn")
    if faults:
        raise LaunchError(f"MindSpeed has not patched Megatron-Core for its arguments: {'; '.join(faults)}.", FRESH)


def _differences(held: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    names = sorted(name for name in held.keys() | asked.keys() if _said(held, name) != _said(asked, name))
    return ", ".join(f"{name} is {_said(held, name)}, asked for is {_said(asked, name)}" for name in names)


def _said(arguments: Mapping[str, Any], name: str) -> str:
    return repr(arguments[name]) if name in arguments else "not given"
