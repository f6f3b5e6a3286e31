"""Binding: an author's engine is checked against the contract and put behind a pluggy plugin manager of its own.

pluggy silently drops hook parameters that have defaults or are keyword-only, accepts implementations that leave
one out, and evaluates properties while it looks for hooks. So the class is read statically, and what pluggy would
let pass is refused here, naming distribution, class and method.
"""

from __future__ import annotations

import inspect
from typing import Any

import pluggy

from engines.contract import PROJECT, BaseEngine
from engines.errors import ContractError, did_you_mean

HOOKS: dict[str, Any] = {
    name: member for name, member in vars(BaseEngine).items() if hasattr(member, "__engines_capability__")
}
"""Every hookspec by name."""


class EnginePluginManager(pluggy.PluginManager):
    """One engine's hooks: the engine itself, and the wrappers that were asked for around it."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(BaseEngine)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        """Every behaviour of `BaseEngine` is a hookspec that one engine answers."""
        if name not in HOOKS:
            return None
        return {"firstresult": True, "historic": False, "warn_on_impl": None, "warn_on_impl_args": None}

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """An engine's hooks need no marker; a wrapper's carry `@hookimpl`. Properties are not evaluated."""
        member = inspect.getattr_static(type(plugin), name, None)
        if isinstance(plugin, BaseEngine):
            if name not in HOOKS or member is HOOKS[name]:
                return None
            marked: dict[str, Any] = {}
        else:
            marked = getattr(member, f"{PROJECT}_impl", None) or {}
            if not marked:
                return None
        defaults = {
            "wrapper": False,
            "hookwrapper": False,
            "optionalhook": False,
            "tryfirst": False,
            "trylast": False,
            "specname": None,
        }
        return {**defaults, **marked}


def check_engine_class(engine_class: type, capabilities: frozenset[str], owner: str) -> None:
    """Refuse a class that breaks the contract, before it is constructed.

    `owner`: the distribution, for messages. Raises `ContractError` with one line per fault.
    """
    where = f"{owner}: {engine_class.__module__}.{engine_class.__qualname__}"
    if not issubclass(engine_class, BaseEngine):
        raise ContractError(f"{where} is not a subclass of engines.BaseEngine")
    faults = [
        fault
        for name, spec in HOOKS.items()
        if (fault := _hook_fault(engine_class, name, spec, capabilities)) is not None
    ]
    faults += _unknown_methods(engine_class)
    if faults:
        raise ContractError("\n".join(f"{where}.{fault}" for fault in faults))


def check_wrapper(wrapper: object) -> None:
    """Refuse a wrapper whose hooks don't take part as it thinks. Raises `ContractError`."""
    cls = type(wrapper)
    where = f"wrapper {cls.__module__}.{cls.__qualname__}"
    hooks = 0
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        options = getattr(member, f"{PROJECT}_impl", None)
        if options is None:
            continue
        hooks += 1
        if name not in HOOKS:
            raise ContractError(f"{where}.{name} is no hook.{did_you_mean(name, list(HOOKS))}")
        if not options["wrapper"]:
            raise ContractError(f"{where}.{name} must be marked @hookimpl(wrapper=True); only engines answer hooks")
        if not inspect.isgeneratorfunction(member):
            raise ContractError(f"{where}.{name} must be a generator: `result = yield` runs what it wraps")
        fault = _parameter_fault(name, member, HOOKS[name], all_of_them=False)
        if fault:
            raise ContractError(f"{where}.{fault}")
    if not hooks:
        raise ContractError(f"{where} wraps no hook: mark at least one method with @hookimpl(wrapper=True)")


def _hook_fault(engine_class: type, name: str, spec: Any, capabilities: frozenset[str]) -> str | None:
    member = inspect.getattr_static(engine_class, name)
    if member is spec:
        capability = spec.__engines_capability__
        if capability is None:
            return f"{name} is missing: every engine must have it, with {inspect.signature(spec)}"
        if capability in capabilities:
            return f"{name} is missing: the manifest declares {capability}, which needs it"
        return None
    if not inspect.isfunction(member):
        return f"{name} is a {type(member).__name__}; it must be a plain method"
    return _parameter_fault(name, member, spec, all_of_them=True)


def _parameter_fault(name: str, member: Any, spec: Any, *, all_of_them: bool) -> str | None:
    wanted = list(inspect.signature(spec).parameters)
    found = inspect.signature(member).parameters
    for parameter in found.values():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return f"{name}: parameter {parameter.name} is {parameter.kind.description}; pluggy would not pass it"
        if parameter.default is not inspect.Parameter.empty:
            return f"{name}: parameter {parameter.name} has a default; pluggy would silently not pass it"
        if parameter.name not in wanted:
            hint = did_you_mean(parameter.name, wanted)
            return f"{name}: unknown parameter {parameter.name}.{hint} The hook takes ({', '.join(wanted)})"
    missing = [parameter for parameter in wanted if parameter not in found]
    if missing and all_of_them:
        return f"{name}: leaves out {', '.join(missing)}; the hook takes ({', '.join(wanted)})"
    return None


def _unknown_methods(engine_class: type) -> list[str]:
    known = {*HOOKS, *(name for name in dir(BaseEngine))}
    faults = []
    for name in dir(engine_class):
        if name.startswith("_") or name in known:
            continue
        member = inspect.getattr_static(engine_class, name)
        if inspect.isroutine(member):
            hint = did_you_mean(name, list(HOOKS)) or " Helpers of an engine begin with an underscore."
            faults.append(f"{name} is a public method that the contract doesn't know.{hint}")
    return faults
