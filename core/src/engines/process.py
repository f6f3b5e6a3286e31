"""What engines have done to this process: patches, environment variables and imports cannot be taken back.

This is the one piece of state that belongs to the process and not to an engine, because that is what it is about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType

Prepare = str | Callable[[], object]


@dataclass(frozen=True)
class Owner:
    """An engine that has been loaded into this process."""

    backend: str
    device: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.backend} on {self.device} ({self.distribution})"


@dataclass
class Marks:
    """The traces that loading engines has left in a process."""

    loaded: dict[Owner, str] = field(default_factory=dict)
    """Engines whose loading has begun: "shared" or "exclusive"."""
    environment: dict[str, tuple[str, Owner]] = field(default_factory=dict)
    """Variables that an engine needs, with the value and who set it first."""
    prepared: dict[Prepare, BaseException | None] = field(default_factory=dict)
    """`prepare` functions that have run, each with what it raised."""


here = Marks()
"""The marks on this process."""


def imported_too_early(before: tuple[str, ...], prepare: Prepare | None) -> str | None:
    """Which modules that `prepare` must precede are imported although it has not run, and by whom; else None."""
    if prepare in here.prepared:
        return None
    early = [name for name in before if sys.modules.get(name) is not None]
    if not early:
        return None
    by = importer_of(early[0]) or "a function, or something else that holds on to nothing of it"
    return f"{' and '.join(early)} already imported by {by}"


def importer_of(target: str) -> str | None:
    """A module that holds `target`, or something from it, in its namespace: the one imported first, if any."""
    for name, module in list(sys.modules.items()):
        inside = name == target or name.startswith(f"{target}.") or target.startswith(f"{name}.")
        if not inside and isinstance(module, ModuleType) and _holds(module, target):
            return name
    return None


def _holds(module: ModuleType, target: str) -> bool:
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            origin = value.__name__
            if origin == target.partition(".")[0]:  # all that `import a.b` binds is `a`
                return True
        elif isinstance(value, FunctionType | type):
            origin = value.__module__
        else:
            continue
        if origin == target or (isinstance(origin, str) and origin.startswith(f"{target}.")):
            return True
    return False
