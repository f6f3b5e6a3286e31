"""Installed engines as `list`, `show` and `doctor` see them: one row per backend and device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from engines.discovery import Broken
from engines.registry import Candidate, Registry

STATUSES = ("available", "unavailable", "broken")


@dataclass(frozen=True)
class Row:
    """One engine on one device; the fields are the keys of `engines list --json`."""

    backend: str
    """The word that chooses it; of a plugin whose manifest cannot be read its id."""
    model_types: list[str]
    device: str | None
    priority: int | None
    distribution: str
    version: str
    status: str
    """One of STATUSES."""
    reason: str | None
    remedy: str | None
    summary: str | None
    capabilities: list[str]
    manifest: str
    """The manifest's file, or of a plugin whose manifest cannot be read the file that is at fault."""
    plugin: str
    """The plugin's id, which is the name of its entry point and what the deny list names."""

    def as_json(self) -> dict[str, Any]:
        """The object of `engines list --json`."""
        return asdict(self)

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".rstrip()


def all_rows(registry: Registry) -> list[Row]:
    """Every engine on every device, usable or not, in the order in which people look for them."""
    ranks = {spec.name: spec.rank for spec in registry.devices().values()}
    usable = [_row(registry, candidate) for candidate in registry.candidates()]
    broken = [row for one in registry.broken() for row in _broken_rows(one)]
    return sorted(
        usable + broken,
        key=lambda row: (
            row.backend,
            row.distribution,
            STATUSES.index(row.status),
            -ranks.get(row.device or "", 0),
        ),
    )


def _row(registry: Registry, one: Candidate) -> Row:
    state = registry.availability(one)
    return Row(
        backend=one.backend,
        model_types=list(one.model_types),
        device=one.device,
        priority=one.priority,
        distribution=one.distribution,
        version=one.version,
        status=state.status,
        reason=state.reason or None,
        remedy=state.remedy or None,
        summary=one.summary,
        capabilities=sorted(one.capabilities),
        manifest=one.manifest,
        plugin=one.plugin,
    )


def _broken_rows(broken: Broken) -> list[Row]:
    """The rows that a broken plugin would have had, or one where that cannot be known."""
    plugin = broken.plugin
    unknown = Row(
        backend=broken.entry_point,
        model_types=[],
        device=None,
        priority=None,
        distribution=broken.distribution,
        version=broken.version,
        status="broken",
        reason=broken.cause,
        remedy=broken.remedy,
        summary=None,
        capabilities=[],
        manifest=broken.file,
        plugin=broken.entry_point,
    )
    if plugin is None:
        return [unknown]
    return [
        replace(
            unknown,
            backend=backend,
            model_types=list(entry.model_type),
            device=device,
            priority=entry.priority,
            summary=plugin.manifest.summary,
            capabilities=sorted(entry.capabilities),
            manifest=plugin.path,
        )
        for entry in plugin.manifest.engine
        for backend in entry.backend
        for device in entry.device
    ]
