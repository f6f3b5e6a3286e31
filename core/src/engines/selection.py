"""Engines as the registry sees them: each candidate, each consideration, and the one selected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engines.devices import DeviceSpec
from engines.process import Owner, Prepare


@dataclass(frozen=True)
class Candidate:
    """One engine on one device under one backend word, as a manifest or a registration describes it."""

    backend: str
    device: str
    model_types: tuple[str, ...]
    priority: int
    plugin: str
    """The plugin's id."""
    distribution: str
    version: str
    summary: str
    manifest: str
    """The file that declares it, or "registered in this process"."""
    engine: str | type
    config: str | type
    capabilities: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    install: Mapping[str, str] = field(default_factory=dict, hash=False)
    """How to get modules of `needs`, where the plugin says so itself."""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Ranges of distributions that its own cannot require."""
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    process: Literal["shared", "exclusive"] = "shared"
    prepare: Prepare | None = None
    before: tuple[str, ...] = ()

    @property
    def owner(self) -> Owner:
        """Who a loaded engine belongs to, for messages and for what a process may hold."""
        return Owner(self.backend, self.device, self.distribution)


@dataclass(frozen=True)
class Availability:
    """Whether a candidate can be loaded here, and if not, why and what to do."""

    status: Literal["available", "unavailable", "broken"]
    reason: str = ""
    remedy: str = ""

    @property
    def available(self) -> bool:
        """Whether it can be loaded here."""
        return self.status == "available"


AVAILABLE = Availability("available")


@dataclass(frozen=True)
class Consideration:
    """One candidate, and why it was taken or left."""

    backend: str
    device: str
    distribution: str
    version: str
    priority: int | None
    taken: bool
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{self.backend} on {self.device}" if self.device else self.backend
        remedy = f"; {self.remedy}" if self.remedy else ""
        owner = f"{self.distribution} {self.version}".rstrip()
        return f"{'taken' if self.taken else 'left '}  {where}, {owner}: {self.reason}{remedy}"


@dataclass(frozen=True)
class Selection:
    """The engine that was asked for: what `loading.load` needs, and the reasons why it is this one."""

    model_type: str
    backend: str
    device: str
    device_spec: DeviceSpec
    device_reason: str
    distribution: str
    version: str
    plugin: str
    manifest: str
    summary: str
    priority: int
    engine: str | type
    config: str | type
    capabilities: frozenset[str]
    needs: tuple[str, ...]
    env: Mapping[str, str] = field(hash=False)
    process: Literal["shared", "exclusive"]
    prepare: Prepare | None
    before: tuple[str, ...]
    trace: tuple[Consideration, ...]

    @property
    def owner(self) -> Owner:
        """Who a loaded engine belongs to, for messages and for what a process may hold."""
        return Owner(self.backend, self.device, self.distribution)

    def explain(self) -> str:
        """The choice and its reasons, a line for each candidate."""
        head = f"{self.model_type} {self.backend}: {self.distribution} {self.version}".rstrip()
        lines = [f"{head} on {self.device}", f"  device {self.device}: {self.device_reason}"]
        return "\n".join(lines + [f"  {consideration}" for consideration in self.trace])
