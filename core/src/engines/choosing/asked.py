"""What somebody asks for, and what there is to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.devices import DEVICE_VARIABLE, DeviceSpec, named_device
from engines.discovery import Broken
from engines.errors import ConfigError
from engines.selection import Candidate


@dataclass(frozen=True)
class Field:
    """Everything that a choice is made from."""

    candidates: Sequence[Candidate]
    broken: Sequence[Broken]
    devices: Mapping[str, DeviceSpec]
    denied: frozenset[str] = frozenset()
    """Ids of plugins that the deny list names."""


@dataclass(frozen=True)
class Asked:
    """What somebody asks for."""

    model_type: str
    backend: str | None
    owner: str | None
    device: str | None
    device_by: str
    """Who named the device, over whom."""

    def owns(self, candidate: Candidate) -> bool:
        """Whether the candidate is of the distribution that was asked for, if one was."""
        return self.owner is None or _plain(candidate.distribution) == _plain(self.owner)

    def __str__(self) -> str:
        backend = "any backend" if self.backend is None else f'backend "{self.backend}"'
        owner = f" of {self.owner}" if self.owner else ""
        device = f' on device "{self.device}" ({self.device_by})' if self.device else ""
        return f"{self.model_type} with {backend}{owner}{device}"


def ask(model_type: str, backend: str | None, device: str | None, configured: str | None) -> Asked:
    """Put a request into words: split `backend@distribution`, and find who names the device.

    Raises `ConfigError` where one side of the @, or all, is empty.
    """
    word, at, owner = (backend or "").partition("@")
    if backend is not None and (not word or (at and not owner)):
        raise ConfigError(f'"{backend}" names no backend', "Write BACKEND or BACKEND@DISTRIBUTION, or leave it out.")
    named = {"the argument": device, DEVICE_VARIABLE: named_device(), "engine.device": configured}
    by, name = next(((by, name) for by, name in named.items() if name), ("", None))
    over = [f"{each}={other}" for each, other in named.items() if other and other != name]
    asked_by = f"{by} over {' and '.join(over)}" if over else by
    return Asked(model_type, word or None, owner or None, name, asked_by)


def _plain(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")
