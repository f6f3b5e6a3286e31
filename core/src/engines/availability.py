"""Whether an engine could be loaded here: its device, its requirements, and what has already been imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engines.devices import CPU, DEVICE_VARIABLE, DeviceSpec, presence
from engines.discovery import find_module, is_namespace
from engines.errors import ContractError, did_you_mean
from engines.process import imported_too_early
from engines.requirements import install, install_module, out_of_range, spelt, unmet
from engines.selection import AVAILABLE, Availability, Candidate


def availability(candidate: Candidate, devices: Mapping[str, DeviceSpec]) -> Availability:
    """Availability of a candidate in this process. Imports nothing."""
    spec = devices.get(candidate.device)
    if spec is None:
        return _undescribed(candidate.device, devices)
    return next(_obstacles(candidate, spec), AVAILABLE)


def _undescribed(device: str, devices: Mapping[str, DeviceSpec]) -> Availability:
    """A word close to a device's is a mistake; any other may be a device that a plugin brings which isn't here."""
    hint = did_you_mean(device, devices)
    said = f'nobody describes the device "{device}".{hint}'
    if hint:
        return Availability("broken", said, "mend `device` in the manifest, or install the plugin that brings it")
    return Availability("unavailable", said, "install the plugin that brings it")


def can_be_imported(module: str) -> bool:
    """Whether a module with code in it would be found; a folder without `__init__.py` does not count."""
    spec = find_module(module)
    return spec is not None and not is_namespace(spec)


def _obstacles(candidate: Candidate, spec: DeviceSpec) -> Iterator[Availability]:
    yield from _absent_device(spec)
    yield from _unmet_requirements(candidate.distribution)
    yield from _missing_modules(candidate, spec)
    yield from _other_versions(candidate)
    early = imported_too_early(candidate.before, candidate.prepare)
    if early is not None:
        yield Availability("unavailable", early, "load this engine first, in a fresh process")


def _absent_device(spec: DeviceSpec) -> Iterator[Availability]:
    found = presence(spec)
    if not found.present:
        remedy = "run it on a machine that has one"
        if spec.torch_device == CPU.torch_device:
            remedy += f", or set {DEVICE_VARIABLE}={spec.name}: host memory stands in for it"
        yield Availability("unavailable", found.how, remedy)


def _unmet_requirements(distribution: str) -> Iterator[Availability]:
    """What the plugin's distribution requires, and is not installed in the versions that it asks for."""
    try:
        missing = unmet(distribution)
    except ContractError as error:
        yield Availability("broken", error.message, error.remedy or "")
        return
    if missing:
        remedy = install(one.requirement for one in missing)
        yield Availability("unavailable", f"needs {', and '.join(map(str, missing))}", remedy)


def _missing_modules(candidate: Candidate, spec: DeviceSpec) -> Iterator[Availability]:
    """What the engine needs, and what makes torch know its device; torch itself is for engines to require."""
    how = {**candidate.install, spec.module: spec.install} if spec.install else candidate.install
    needs = candidate.needs if spec.module == CPU.module else (*candidate.needs, spec.module)
    for module in needs:
        if not can_be_imported(module):
            remedy = how.get(module) or install_module(module, candidate.distribution)
            yield Availability("unavailable", f"needs {module}, not installed", remedy)


def _other_versions(candidate: Candidate) -> Iterator[Availability]:
    """Distributions that its own cannot require, installed in versions that it does not work with."""
    for one in out_of_range(candidate.versions):
        found = str(one) if one.found else f"{spelt(one.requirement)}, and no metadata says which version is here"
        remedy = candidate.install.get(one.requirement.name) or install([one.requirement])
        yield Availability("unavailable", f"needs {found}", remedy)
