"""Whether an engine could be loaded here: its device, its needs, and what has already been imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from engines.devices import DeviceSpec, presence
from engines.discovery import find_module, is_namespace
from engines.errors import did_you_mean
from engines.process import imported_too_early
from engines.selection import AVAILABLE, Availability, Candidate

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def availability(candidate: Candidate, devices: Mapping[str, DeviceSpec]) -> Availability:
    """Availability of a candidate in this process. Imports nothing."""
    spec = devices.get(candidate.device)
    if spec is None:
        return Availability(
            "unavailable",
            f'nobody describes the device "{candidate.device}".{did_you_mean(candidate.device, devices)}',
            "install the plugin that brings it",
        )
    found = presence(spec)
    if not found.present:
        return Availability("unavailable", found.how, "run it on a machine that has one")
    for module in candidate.needs:
        if not can_be_imported(module):
            return Availability(
                "unavailable", f"needs {module}, not installed", _install(module, candidate.distribution)
            )
    early = imported_too_early(candidate.before, candidate.prepare)
    if early is not None:
        return Availability("unavailable", early, "load this engine first, in a fresh process")
    return AVAILABLE


def can_be_imported(module: str) -> bool:
    """Whether a module with code in it would be found; a folder without `__init__.py` does not count."""
    spec = find_module(module)
    return spec is not None and not is_namespace(spec)


def _install(module: str, distribution: str) -> str:
    """The command that brings a module, read from what the plugin's distribution requires."""
    from importlib_metadata import PackageNotFoundError, metadata
    from packaging.utils import canonicalize_name

    names = {canonicalize_name(module), canonicalize_name(module.partition(".")[0])}
    try:
        extras = metadata(distribution).get_all("Provides-Extra") or []
    except PackageNotFoundError:  # registered in this process
        return f"install the package that brings {module}"
    for requirement in _requirements(distribution, ""):
        if canonicalize_name(requirement.name) in names:
            return f'pip install "{requirement.name}{requirement.specifier}"'
    for extra in extras:
        if any(canonicalize_name(requirement.name) in names for requirement in _requirements(distribution, extra)):
            return f'pip install "{distribution}[{extra}]"'
    return f"install the package that brings {module}"


def _requirements(distribution: str, extra: str) -> Iterator[Requirement]:
    """What a distribution requires with an extra, and what the extras that it asks others for require."""
    from importlib_metadata import PackageNotFoundError, requires
    from packaging.requirements import Requirement

    try:
        texts = requires(distribution) or []
    except PackageNotFoundError:  # itself not installed
        return
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield requirement
        for asked in requirement.extras:
            yield from _requirements(requirement.name, asked)
