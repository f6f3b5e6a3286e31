"""Whether an engine could be loaded here: its device, its requirements, and what has already been imported."""

from __future__ import annotations

from collections.abc import Mapping

from engines.devices import CPU, DEVICE_VARIABLE, DeviceSpec, presence
from engines.discovery import find_module, is_namespace
from engines.errors import ContractError, did_you_mean
from engines.process import imported_too_early
from engines.requirements import install, install_module, unmet
from engines.selection import AVAILABLE, Availability, Candidate


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
        remedy = "run it on a machine that has one"
        if spec.torch_device == CPU.torch_device:
            remedy += f", or set {DEVICE_VARIABLE}={spec.name}: host memory stands in for it"
        return Availability("unavailable", found.how, remedy)
    required = _requirements_met(candidate.distribution)
    if not required.available:
        return required
    for module in candidate.needs:
        if not can_be_imported(module):
            remedy = candidate.install.get(module) or install_module(module, candidate.distribution)
            return Availability("unavailable", f"needs {module}, not installed", remedy)
    early = imported_too_early(candidate.before, candidate.prepare)
    if early is not None:
        return Availability("unavailable", early, "load this engine first, in a fresh process")
    return AVAILABLE


def can_be_imported(module: str) -> bool:
    """Whether a module with code in it would be found; a folder without `__init__.py` does not count."""
    spec = find_module(module)
    return spec is not None and not is_namespace(spec)


def _requirements_met(distribution: str) -> Availability:
    """Whether what the plugin's distribution requires is installed, in the versions that it asks for."""
    try:
        missing = unmet(distribution)
    except ContractError as error:
        return Availability("broken", error.message, error.remedy or "")
    if not missing:
        return AVAILABLE
    return Availability(
        "unavailable",
        f"needs {', and '.join(map(str, missing))}",
        install(one.requirement for one in missing),
    )
