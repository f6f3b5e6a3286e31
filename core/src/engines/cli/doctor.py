"""`engines doctor`: what is broken among the installed plugins, and what to do."""

from __future__ import annotations

import json
import platform
from typing import Any

import click

from engines.cli.extensions import ExtensionState, examine_extensions
from engines.devices import Presence, presence
from engines.errors import BrokenPlugin, EnginesError
from engines.registry import Candidate, registry
from engines.selection import Availability

States = dict[Candidate, Availability]
"""Engines on devices, and whether they can be loaded here."""


@click.command
@click.option("--load", "load_all", is_flag=True, help="Also import each available engine, in a process of its own.")
@click.option("--json", "as_json", is_flag=True, help="The findings as one object.")
def doctor(load_all: bool, as_json: bool) -> int:
    """Find what is broken among the installed plugins. Exit code 1 if anything is, else 0.

    An engine whose device or requirements are missing here is unavailable, not broken.
    """
    devices = {spec.name: presence(spec) for spec in registry.devices().values()}
    extensions = examine_extensions()
    states = {one: registry.availability(one) for one in registry.candidates()}
    broken_torch = [error for one in extensions if (error := one.broken())]
    broken = broken_torch + [one.error() for one in registry.broken()] + _broken_here(states)
    loaded, unloadable = _load_all(states) if load_all and not broken_torch else ([], [])
    broken += unloadable
    if load_all and broken_torch:
        click.echo("No engine was loaded, since what torch or transformers imports is broken.", err=True)
    absent = {name for name, found in devices.items() if not found.present}
    hindered = {
        one: state for one, state in states.items() if state.status == "unavailable" and one.device not in absent
    }
    if as_json:
        click.echo(json.dumps(_report(devices, extensions, hindered, loaded, broken), indent=2))
    else:
        _print(devices, extensions, hindered, loaded, broken)
    return 1 if broken else 0


def _broken_here(states: States) -> list[BrokenPlugin]:
    """Engines whose manifests can be read, but not their requirements, or which two plugins claim alike."""
    found: dict[tuple[str, str, str], BrokenPlugin] = {}
    for one, state in states.items():
        if state.status == "broken":
            error = BrokenPlugin(one.distribution, one.plugin, one.manifest, state.reason, state.remedy)
            found.setdefault((one.plugin, one.backend, state.reason), error)
    return list(found.values())


def _load_all(states: States) -> tuple[list[Candidate], list[BrokenPlugin]]:
    """Load each distinct engine that is available; what users must mend elsewhere counts as broken here."""
    from engines.cli.probe import load_error

    loaded, broken = [], []
    seen: set[tuple[Any, ...]] = set()
    for one, state in states.items():
        key = (one.distribution, one.engine, one.config, one.prepare)
        if key in seen or not state.available:
            continue
        seen.add(key)
        error = load_error(one, registry)
        if error is None:
            loaded.append(one)
        else:
            broken.append(_as_broken(one, error))
    return loaded, broken


def _as_broken(one: Candidate, error: EnginesError) -> BrokenPlugin:
    if isinstance(error, BrokenPlugin):
        return error
    return BrokenPlugin(one.distribution, one.plugin, one.manifest, error.message, error.remedy or "see above")


def _print(
    devices: dict[str, Presence],
    extensions: list[ExtensionState],
    hindered: States,
    loaded: list[Candidate],
    broken: list[BrokenPlugin],
) -> None:
    click.echo(f"engines-core {_core_version()}, Python {platform.python_version()}")
    for name, found in devices.items():
        looked_for = f" ({', '.join(found.looked_for)})" if found.looked_for else ""
        click.echo(f"  device  {name:<8} {'present' if found.present else 'absent '}  {found.how}{looked_for}")
    for state in extensions:
        found_to = "works" if state.error is None else f"cannot be imported: {state.error}"
        click.echo(f"  torch   {state.extension.name:<8} {found_to}")
    owners = {(one.plugin, f"{one.distribution} {one.version}"): one.manifest for one in registry.candidates()}
    for (id, owner), manifest in owners.items():
        click.echo(f"  plugin  {id:<8} {owner}  {manifest}")
        for one, availability in hindered.items():
            if one.plugin == id:
                click.echo(f"          {one.backend} on {one.device}: {availability.reason}; {availability.remedy}")
    for one in loaded:
        click.echo(f"  loaded  {one.backend:<8} {one.engine}")
    for error in broken:
        click.echo(f"{click.style('broken', fg='red')}  {error}")
    click.echo(f"{len(broken)} broken." if broken else "Nothing is broken.")


def _report(
    devices: dict[str, Presence],
    extensions: list[ExtensionState],
    hindered: States,
    loaded: list[Candidate],
    broken: list[BrokenPlugin],
) -> dict[str, Any]:
    keys = ("distribution", "entry_point", "file", "cause", "remedy")
    return {
        "ok": not broken,
        "core": _core_version(),
        "python": platform.python_version(),
        "devices": [
            {"name": name, "present": found.present, "how": found.how, "looked_for": list(found.looked_for)}
            for name, found in devices.items()
        ],
        "torch_extensions": [
            {"name": one.extension.name, "distribution": one.extension.distribution, "error": one.error}
            for one in extensions
        ],
        "plugins": sorted({one.plugin for one in registry.candidates()}),
        "unavailable": [
            {"backend": one.backend, "device": one.device, "reason": state.reason, "remedy": state.remedy}
            for one, state in hindered.items()
        ],
        "loaded": [{"backend": one.backend, "engine": one.engine} for one in loaded],
        "broken": [{key: getattr(error, key) for key in keys} for error in broken],
    }


def _core_version() -> str:
    from importlib_metadata import PackageNotFoundError, version

    try:
        return version("engines-core")
    except PackageNotFoundError:
        return "(not installed)"
