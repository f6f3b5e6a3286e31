"""One declared plugin read from its manifest, or the record of why it cannot be used."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.machinery import ModuleSpec

from engines.discovery.metadata import Installed
from engines.discovery.modules import find_module, is_namespace, missing_attribute
from engines.errors import BrokenPlugin, ContractError
from engines.manifest import MANIFEST_NAME, Manifest, parse_manifest


@dataclass(frozen=True)
class Plugin:
    """A distribution's engines, as its manifest describes them. None of its code has run."""

    id: str
    """The name of its entry point."""
    distribution: str
    version: str
    package: str
    manifest: Manifest
    path: str
    """The manifest's file."""


@dataclass(frozen=True)
class Broken:
    """A declared plugin that cannot be used: who, where, why, and what to do."""

    distribution: str
    version: str
    entry_point: str
    file: str
    cause: str
    remedy: str
    plugin: Plugin | None = None
    """What its manifest says, where that much could be read."""

    def error(self) -> BrokenPlugin:
        """As an exception; its `str()` is one line."""
        return BrokenPlugin(self.distribution, self.entry_point, self.file, self.cause, self.remedy)

    def __str__(self) -> str:
        return str(self.error())


class Fault(Exception):
    """What is wrong with the plugin that is being read."""

    def __init__(self, file: str, cause: str, remedy: str, plugin: Plugin | None = None) -> None:
        super().__init__(cause)
        self.file = file
        self.cause = cause
        self.remedy = remedy
        self.plugin = plugin


def read_plugin(installed: Installed, id: str, value: str) -> Plugin | Broken:
    """The plugin that one entry point declares. Runs no code of it."""
    try:
        return _read(installed, id, value)
    except Fault as fault:
        return Broken(installed.name, installed.version, id, fault.file, fault.cause, fault.remedy, fault.plugin)


def _read(installed: Installed, id: str, value: str) -> Plugin:
    if not re.fullmatch(r"[A-Za-z_]\w*", value):
        raise Fault(
            os.path.join(installed.folder, "entry_points.txt"),
            f'its value "{value}" must be one top-level package: no dots, no attribute, no extras',
            f'write `{id} = "{re.split("[.:]", value)[0].strip()}"`',
        )
    spec = find_module(value)
    if spec is None:
        raise Fault(installed.folder, f"package {value} is gone", _reinstall(installed))
    folder = _own_folder(installed, value, spec)
    path = os.path.join(folder, MANIFEST_NAME)
    data = _manifest_bytes(installed, value, spec, path)
    try:
        manifest = parse_manifest(data)
    except ContractError as error:
        raise Fault(path, error.message, error.remedy or "") from None
    plugin = Plugin(id, installed.name, installed.version, value, manifest, path)
    for entry in manifest.engine:
        for key, dotted in (("engine", entry.engine), ("config", entry.config), ("prepare", entry.prepare)):
            why = missing_attribute(dotted) if dotted else None
            if why is not None:
                raise Fault(path, f'{key} = "{dotted}": {why}', "mend the manifest or the package", plugin)
    return plugin


def _own_folder(installed: Installed, package: str, spec: ModuleSpec) -> str:
    """The folder of the package that an import would find, which must be the distribution's own."""
    init = f"{package}/__init__.py"
    if is_namespace(spec):
        folder = next(iter(spec.submodule_search_locations or ()), package)
        if installed.records(init):
            raise Fault(folder, f"{package} has lost its __init__.py", _reinstall(installed))
        raise Fault(
            folder,
            f"{package} is a namespace package, which anybody may extend, so it cannot own a manifest",
            "add an __init__.py to it",
        )
    origin = spec.origin or ""
    if spec.submodule_search_locations is None:
        raise Fault(origin, f"{package} is a single module and has no room for a manifest", "make it a package")
    folder = os.path.dirname(origin)
    if _belongs(installed, package, folder):
        return folder
    if installed.project is None and installed.record is not None and not installed.records(f"{package}/"):
        raise Fault(
            folder,
            f"{package} is not among the files that this distribution installed",
            "name the distribution's own package in the entry point",
        )
    mine = installed.project or os.path.join(installed.parent, package)
    raise Fault(
        folder,
        f"shadowed: `import {package}` finds {folder} instead of {mine}",
        "run from another folder, or rename the one in the way",
    )


def _belongs(installed: Installed, package: str, folder: str) -> bool:
    """By RECORD, by the path of an editable installation, or, where neither is kept, by lying beside the metadata."""
    folder = os.path.realpath(folder)
    if installed.project is not None:
        project = os.path.realpath(installed.project)
        return folder.startswith(project + os.sep)
    if installed.record is not None and not installed.records(f"{package}/"):
        return False
    return folder == os.path.realpath(os.path.join(installed.parent, package))


def _manifest_bytes(installed: Installed, package: str, spec: ModuleSpec, path: str) -> bytes:
    get_data = getattr(spec.loader, "get_data", None)
    if get_data is None:
        raise Fault(path, f"{type(spec.loader).__name__}, which loads {package}, reads no data", "install the wheel")
    listed = installed.records(f"{package}/{MANIFEST_NAME}")
    try:
        data: bytes = get_data(path)
    except FileNotFoundError:
        raise _missing_manifest(installed, path, listed) from None
    except OSError as error:
        if not error.errno:  # what zipimport raises for a name that the archive lacks
            raise _missing_manifest(installed, path, listed) from None
        raise Fault(path, f"cannot be read: {error.strerror}", "make it readable") from None
    if installed.project is None and installed.record is not None and not listed:
        raise Fault(
            path, "the manifest is not among the files that this distribution installed", _packaging(installed)
        )
    return data


def _missing_manifest(installed: Installed, path: str, listed: bool) -> Fault:
    if listed:
        return Fault(path, "the manifest is missing although it was installed", _reinstall(installed))
    if installed.project is not None or installed.is_egg_info:
        return Fault(path, "the manifest is missing", f"write {MANIFEST_NAME} beside the package's __init__.py")
    return Fault(path, "the manifest is missing: the wheel was built without it", _packaging(installed))


def _packaging(installed: Installed) -> str:
    if installed.generator.startswith(("setuptools", "bdist_wheel")):
        return (
            "setuptools leaves it out unless told: add `[tool.setuptools.package-data]` "
            f'with `"*" = ["{MANIFEST_NAME}"]` to its pyproject.toml and build it again'
        )
    return f"build the wheel with {MANIFEST_NAME} beside the package's __init__.py"


def _reinstall(installed: Installed) -> str:
    return f"pip install --force-reinstall --no-deps {installed.name}, or pip uninstall {installed.name}"
