"""Which plugins are installed, found from metadata alone: no torch, no code of theirs.

A plugin is an entry point of the group `engines`: its name is the plugin's id, its value one top-level package,
beside whose `__init__.py` lies `engine.toml`. What cannot be used becomes a `Broken` record and disturbs nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from engines.devices import DeviceSpec
from engines.discovery.metadata import Installed, current, installed_versions
from engines.discovery.modules import find_module, is_namespace
from engines.discovery.plugin import Broken, Plugin, read_plugin

__all__ = ["Broken", "Discovery", "Plugin", "discover", "find_module", "is_namespace"]


@dataclass(frozen=True)
class Discovery:
    """What is installed: the plugins that can be used, and those that cannot."""

    plugins: tuple[Plugin, ...]
    broken: tuple[Broken, ...]


def discover() -> Discovery:
    """Read the metadata and manifests of all installed distributions that declare engines."""
    read: list[Plugin | Broken] = []
    for versions in installed_versions().values():
        counts, stale = _current(versions)
        read.extend(stale)
        if counts is not None:
            read.extend(read_plugin(counts, id, value) for id, value in counts.declared.items())
    read = _distinct_ids(read)
    read = _agreed_devices(read)
    plugins = sorted((one for one in read if isinstance(one, Plugin)), key=lambda one: (one.id, one.distribution))
    broken = sorted(
        (one for one in read if isinstance(one, Broken)), key=lambda one: (one.entry_point, one.distribution)
    )
    return Discovery(tuple(plugins), tuple(broken))


def _current(versions: list[Installed]) -> tuple[Installed | None, list[Broken]]:
    """Which of several metadata folders of one distribution counts, and what the others break.

    Two that count equally break the plugin. An `.egg-info` that does not count is reported if it declares another.
    """
    rivals = current(versions)
    counts = rivals[0]
    if len(rivals) > 1:
        folders = ", ".join(os.path.basename(found.folder) for found in rivals)
        ids = {id: found for found in reversed(rivals) for id in found.declared}
        return None, [
            Broken(
                counts.name,
                found.version,
                id,
                found.folder,
                f"stale metadata: {len(rivals)} installations of {counts.name} in one place ({folders})",
                f"delete all but the true one, then pip install --force-reinstall --no-deps {counts.name}",
            )
            for id, found in ids.items()
        ]
    leftovers = [
        Broken(
            counts.name,
            found.version,
            id,
            found.folder,
            f"stale metadata: a leftover of a build declares it, {os.path.basename(counts.folder)} does not",
            "delete that folder",
        )
        for found in versions
        if found.is_egg_info and not counts.is_egg_info
        for id, value in found.declared.items()
        if counts.declared.get(id) != value
    ]
    return counts, leftovers


def _distinct_ids(read: Iterable[Plugin | Broken]) -> list[Plugin | Broken]:
    """A plugin's id means one distribution: where two claim it, neither can be used."""
    read = list(read)
    owners: dict[str, set[str]] = {}
    for one in read:
        if isinstance(one, Plugin):
            owners.setdefault(one.id, set()).add(one.distribution)
    return [
        _break(one, f'two distributions claim the id "{one.id}": {_and(owners[one.id])}', "uninstall one of them")
        if isinstance(one, Plugin) and len(owners[one.id]) > 1
        else one
        for one in read
    ]


def _agreed_devices(read: Iterable[Plugin | Broken]) -> list[Plugin | Broken]:
    """A device's name means one set of facts: where two plugins disagree, neither can be used."""
    read = list(read)
    said: dict[str, dict[str, DeviceSpec]] = {}
    for one in read:
        if isinstance(one, Plugin):
            for entry in one.manifest.device:
                said.setdefault(entry.name, {})[one.distribution] = entry.spec()
    disputed = {name: by for name, by in said.items() if len(set(by.values())) > 1}
    result: list[Plugin | Broken] = []
    for one in read:
        names = [] if isinstance(one, Broken) else [entry.name for entry in one.manifest.device]
        name = next((name for name in names if name in disputed), None)
        if name is None or isinstance(one, Broken):
            result.append(one)
        else:
            cause = f'distributions describe the device "{name}" differently: {_and(disputed[name])}'
            result.append(_break(one, cause, "uninstall all but one of them"))
    return result


def _break(plugin: Plugin, cause: str, remedy: str) -> Broken:
    return Broken(plugin.distribution, plugin.version, plugin.id, plugin.path, cause, remedy, plugin)


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))
