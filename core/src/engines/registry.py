"""Which engines there are, and which one is meant by a model type, a backend word and a device.

    selection = registry.resolve("language_model", "fsdp2")
    print(selection.explain())

Nothing here imports torch or runs a plugin's code; `engines.loading.load` does.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

from pydantic import ValidationError

from engines.availability import availability
from engines.devices import BUILT_IN, DeviceSpec
from engines.discovery import Broken, Discovery, Plugin, discover
from engines.discovery.metadata import installed
from engines.errors import ConfigError, did_you_mean
from engines.manifest import EngineEntry, describe_faults
from engines.process import Prepare
from engines.selection import Availability, Candidate, Selection

__all__ = ["Candidate", "EngineFields", "Registration", "Registry", "Selection", "registry"]

DENY_VARIABLE = "ENGINES_DENY"
DENIED = "denied"
"""The reason for which a plugin on the deny list is unavailable."""
IN_PROCESS = "in-process"
"""The distribution of engines that are registered in this process."""
HERE = "registered in this process"


class EngineFields(TypedDict, total=False):
    """The fields of `Registry.register`: those of a manifest's `[[engine]]`, `engine` and `config` being required.

    `engine`, `config` and `prepare` may be the objects themselves instead of their dotted names.
    """

    backend: str | Sequence[str]
    model_type: str | Sequence[str]
    device: str | Sequence[str]
    engine: str | type
    config: str | type
    priority: int
    capabilities: Iterable[str]
    needs: Sequence[str]
    install: Mapping[str, str]
    versions: Mapping[str, str]
    env: Mapping[str, str]
    process: Literal["shared", "exclusive"]
    prepare: Prepare
    before: Sequence[str]
    summary: str
    id: str
    devices: Sequence[DeviceSpec]


@dataclass(frozen=True)
class Registration:
    """Engines that were registered in this process, to be handed to `Registry.unregister`."""

    candidates: tuple[Candidate, ...]
    devices: tuple[DeviceSpec, ...]


class Registry:
    """The engines that are installed and those registered in this process.

    `deny` holds ids of plugins that must not be used, in addition to those in `ENGINES_DENY`.
    """

    def __init__(self, deny: Iterable[str] = (), discover: Callable[[], Discovery] = discover) -> None:
        self.deny = frozenset(deny)
        self._discover = discover
        self._discovery: Discovery | None = None
        self._installed: tuple[Candidate, ...] = ()
        self._registrations: list[Registration] = []

    def resolve(
        self, model_type: str, backend: str | None, device: str | None = None, *, configured: str | None = None
    ) -> Selection:
        """The engine that is meant.

        `backend` is a word, `word@distribution`, or None for any backend. `device` wins over `ENGINES_DEVICE`, which
        wins over `configured`, the device that a configuration names.
        Raises EngineNotFound with every candidate and why it was left.
        """
        from engines.choosing import Field, ask, choose  # here, since `engines list` has no use for it

        denied = self.denied()
        return choose(
            ask(model_type, backend, device, configured),
            Field(self.candidates(), self.broken(), self.devices(), denied),
        )

    def candidates(self) -> tuple[Candidate, ...]:
        """Every engine on every device that it declares, denied and unavailable ones included."""
        self._found()
        return self._installed + tuple(one for added in self._registrations for one in added.candidates)

    def availability(self, candidate: Candidate) -> Availability:
        """Whether a candidate can be loaded here, and if not, why.

        It is broken in an undecided tie, and where its distribution's requirements cannot be read.
        """
        if candidate.plugin in self.denied():
            return Availability("unavailable", DENIED, f"take {candidate.plugin} out of {DENY_VARIABLE}")
        rivals = self._rivals(candidate)
        if rivals:
            return Availability("broken", _undecided(rivals), _decide(candidate))
        return availability(candidate, self.devices())

    def broken(self) -> tuple[Broken, ...]:
        """Installed plugins that cannot be used, save those that are denied."""
        denied = self.denied()
        return tuple(one for one in self._found().broken if one.entry_point not in denied)

    def devices(self) -> dict[str, DeviceSpec]:
        """Every device that core, a manifest or a registration describes, by name."""
        specs = dict(BUILT_IN)
        for plugin in self._found().plugins:
            specs.update({entry.name: entry.spec() for entry in plugin.manifest.device})
        for registration in self._registrations:
            specs.update({spec.name: spec for spec in registration.devices})
        return specs

    def denied(self) -> frozenset[str]:
        """Ids of plugins on the deny list. Raises ConfigError for one that is not installed."""
        named = {word.strip() for word in os.environ.get(DENY_VARIABLE, "").split(",")} - {""} | self.deny
        if named:
            found = self._found()
            known = {plugin.id for plugin in found.plugins} | {one.entry_point for one in found.broken}
            known |= {one.plugin for registration in self._registrations for one in registration.candidates}
            for name in sorted(named - known):
                raise ConfigError(
                    f'The deny list ({DENY_VARIABLE}) names "{name}", which is no plugin\'s id.'
                    + did_you_mean(name, known),
                    f"Installed: {', '.join(sorted(known)) or 'none'}.",
                )
        return frozenset(named)

    def engines_with(self, capability: str) -> list[str]:
        """Backends of the installed engines that declare a capability, for the refusal by one that does not."""
        denied = self.denied()
        return sorted(
            {one.backend for one in self.candidates() if capability in one.capabilities and one.plugin not in denied}
        )

    def register(self, **fields: Unpack[EngineFields]) -> Registration:
        """Add an engine to this process, as if its distribution were installed.

        Raises ConfigError for a wrong field.
        """
        registration = _registration(fields)
        self._registrations.append(registration)
        return registration

    def unregister(self, registration: Registration) -> None:
        """Take back what `register` added."""
        self._registrations = [one for one in self._registrations if one is not registration]

    @contextmanager
    def registered(self, **fields: Unpack[EngineFields]) -> Iterator[Registration]:
        """`register` for the length of a `with` block."""
        registration = self.register(**fields)
        try:
            yield registration
        finally:
            self.unregister(registration)

    def refresh(self) -> None:
        """Look again: something was installed or removed since this process started."""
        importlib.invalidate_caches()
        installed.cache_clear()
        self._discovery = None

    def _found(self) -> Discovery:
        if self._discovery is None:
            self._discovery = self._discover()
            self._installed = tuple(one for plugin in self._discovery.plugins for one in _candidates_of(plugin))
        return self._discovery

    def _rivals(self, candidate: Candidate) -> list[Candidate]:
        """All owners of a key among which priority does not decide, the candidate included; empty if it does."""
        denied = self.denied()
        owners = [
            one
            for one in self.candidates()
            if (one.backend, one.device, one.priority) == (candidate.backend, candidate.device, candidate.priority)
            and set(one.model_types) & set(candidate.model_types)
            and one.plugin not in denied
        ]
        return owners if len(owners) > 1 else []


def _undecided(rivals: Sequence[Candidate]) -> str:
    owners = " and ".join(sorted({rival.distribution for rival in rivals}))
    return f"{owners} claim {rivals[0].backend} on {rivals[0].device} with equal priority {rivals[0].priority}"


def _decide(one: Candidate) -> str:
    return f"write {one.backend}@{one.distribution}, deny one of them in {DENY_VARIABLE}, or uninstall it"


def _candidates_of(plugin: Plugin) -> Iterator[Candidate]:
    for entry in plugin.manifest.engine:
        for one in _candidates(entry, plugin.id, plugin.manifest.summary):
            yield replace(one, distribution=plugin.distribution, version=plugin.version, manifest=plugin.path)


def _candidates(entry: EngineEntry, id: str, summary: str) -> Iterator[Candidate]:
    """The candidates of one entry, as if it were registered in this process."""
    for backend in entry.backend:
        for device in entry.device:
            yield Candidate(
                backend=backend,
                device=device,
                model_types=entry.model_type,
                priority=entry.priority,
                plugin=id,
                distribution=IN_PROCESS,
                version="",
                summary=summary,
                manifest=HERE,
                engine=entry.engine,
                config=entry.config,
                capabilities=frozenset(entry.capabilities),
                needs=entry.needs,
                install=entry.install,
                versions=entry.versions,
                env=entry.env,
                process=entry.process,
                prepare=entry.prepare,
                before=entry.before,
            )


def _registration(fields: EngineFields) -> Registration:
    given: dict[str, Any] = dict(fields)
    devices = tuple(given.pop("devices", ()))
    summary = given.pop("summary", HERE)
    id = given.pop("id", None)
    objects = {key: given[key] for key in ("engine", "config", "prepare") if callable(given.get(key))}
    given |= {key: f"registered.{key}:Object" for key in objects}
    for key in ("backend", "model_type", "device"):
        if isinstance(given.get(key), str):
            given[key] = (given[key],)
    for key in ("capabilities", "needs", "before"):
        if key in given:
            given[key] = tuple(sorted(given[key]) if key == "capabilities" else given[key])
    try:
        entry = EngineEntry.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"This engine cannot be registered: {describe_faults(error, EngineEntry)}") from None
    candidates = _candidates(entry, id or entry.backend[0], summary)
    return Registration(tuple(replace(one, **objects) for one in candidates), devices)


registry = Registry()
"""The registry of this process."""
