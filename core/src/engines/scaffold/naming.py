"""What a new plugin and its parts are called, and whether those names are free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from engines.choosing import PUBLISHED
from engines.devices import CPU
from engines.errors import ConfigError
from engines.registry import Registry
from engines.testing.reference import REFERENCE

NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
OURS = frozenset({"core", str(REFERENCE["backend"])})
"""Names of this project that no registry knows."""
LONGEST = 64
"""Letters of a name."""


@dataclass(frozen=True)
class Names:
    """The names that follow from the backend's."""

    backend: str
    device: str = CPU.name

    @property
    def distribution(self) -> str:
        """What pip installs."""
        return f"engines-{self.backend}"

    @property
    def package(self) -> str:
        """What Python imports."""
        return f"engines_{self.backend.replace('-', '_')}"

    @property
    def stem(self) -> str:
        """What its classes' names begin with."""
        return "".join(word.capitalize() for word in re.split("[_-]", self.backend))

    @property
    def has_own_device(self) -> bool:
        """Whether the plugin describes its device."""
        return self.device != CPU.name


def check_names(names: Names, registry: Registry) -> None:
    """Raise ConfigError for a name that can't be one, or that somebody else has."""
    if NAME.fullmatch(names.backend) is None or len(names.backend) > LONGEST:
        raise ConfigError(
            f'"{names.backend}" can\'t name a backend, a distribution and a package at once.',
            f"Use a lower-case letter, then letters and digits, in words joined by - or _, {LONGEST} in all at most.",
        )
    if owner := _owner(names, registry):
        raise ConfigError(f'"{names.backend}" is taken by {owner}.', "Choose another name.")
    if names.has_own_device:
        _check_device(names.device, registry)


def _owner(names: Names, registry: Registry) -> str | None:
    """Who has the backend word, the plugin's id or the distribution."""
    if names.backend in OURS:
        return "engines-core"
    taken = [(backend, distribution) for (backend, _), distribution in PUBLISHED.items() if backend is not None]
    taken += [(word, one.distribution) for one in registry.candidates() for word in (one.backend, one.plugin)]
    taken += [(broken.entry_point, broken.distribution) for broken in registry.broken()]
    mine = canonicalize_name(names.distribution)
    return next((owner for word, owner in taken if word == names.backend or canonicalize_name(owner) == mine), None)


def _check_device(device: str, registry: Registry) -> None:
    if DEVICE.fullmatch(device) is None:
        raise ConfigError(f'"{device}" can\'t name a device.', "Use letters and digits, and between them - _ and .")
    if device in registry.devices():
        raise ConfigError(
            f'The device "{device}" is described already, by engines-core or an installed plugin.',
            f'Leave out --device, and write `device = ["{device}"]` into the new engine.toml.',
        )
