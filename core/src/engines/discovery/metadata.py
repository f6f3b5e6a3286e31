"""What installed distributions say about themselves: who declares an entry point of the group `engines`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote, urlparse

import importlib_metadata

GROUP = "engines"


@dataclass(frozen=True, eq=False)
class Installed:
    """One metadata folder (`*.dist-info`, `*.egg-info`) of a distribution."""

    dist: importlib_metadata.Distribution

    @cached_property
    def folder(self) -> str:
        """The metadata folder itself, inside a zip written as if that were a folder."""
        return os.path.normpath(str(getattr(self.dist, "_path", self.dist.locate_file(""))))

    @property
    def parent(self) -> str:
        """The folder that holds the metadata and, where nothing is editable, the packages."""
        return os.path.dirname(self.folder)

    @property
    def is_egg_info(self) -> bool:
        """Whether setuptools wrote it beside its sources."""
        return self.folder.endswith(".egg-info")

    @cached_property
    def _metadata(self) -> Mapping[str, str]:
        """The headers of METADATA or PKG-INFO; empty where an interrupted installation left none.

        Name and Version are single lines, so that the email package need not be imported for them.
        """
        text = self.dist.read_text("METADATA") or self.dist.read_text("PKG-INFO") or ""
        headers = text.partition("\n\n")[0].splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in headers)}

    @cached_property
    def name(self) -> str:
        """The distribution's name; the folder's where the metadata has none."""
        return self._metadata.get("Name") or os.path.basename(self.folder).split("-")[0].replace("_", "-")

    @property
    def version(self) -> str:
        """The version, or an empty string where the metadata has none."""
        return self._metadata.get("Version", "")

    @cached_property
    def key(self) -> str:
        """The name as indexes compare it."""
        return re.sub(r"[-_.]+", "-", self.name).lower()

    @cached_property
    def declared(self) -> dict[str, str]:
        """Entry points of the group `engines`: name to value. Reads one small file."""
        text = self.dist.read_text("entry_points.txt")
        if text is None or f"[{GROUP}]" not in text:
            return {}
        return {point.name: point.value for point in self.dist.entry_points.select(group=GROUP)}

    @cached_property
    def record(self) -> str | None:
        """RECORD with a line break before each path, or None where installers leave none."""
        text = self.dist.read_text("RECORD")
        return None if text is None else "\n" + text.replace("\r\n", "\n")

    def records(self, path: str) -> bool:
        """Whether RECORD lists `path`, or anything below it if it ends in a slash."""
        return self.record is not None and f"\n{path}" + ("" if path.endswith("/") else ",") in self.record

    @cached_property
    def project(self) -> str | None:
        """The project folder of an editable installation."""
        text = self.dist.read_text("direct_url.json")
        direct = json.loads(text) if text else {}
        if not direct.get("dir_info", {}).get("editable", False):
            return None
        return unquote(urlparse(direct["url"]).path)

    @property
    def generator(self) -> str:
        """The build backend that made the wheel, as its WHEEL file says."""
        for line in (self.dist.read_text("WHEEL") or "").splitlines():
            key, _, value = line.partition(":")
            if key == "Generator":
                return value.strip()
        return ""


def installed_versions() -> dict[str, list[Installed]]:
    """For each distribution that declares engines, every metadata folder of that name on the path, in its order."""
    by_name: dict[str, list[Installed]] = {}
    for found in _declaring():
        by_name.setdefault(found.key, []).append(found)
    for key, declaring in by_name.items():
        others = (Installed(dist) for dist in importlib_metadata.Distribution.discover(name=key))
        known = {_identity(found) for found in declaring}
        # The path's order decides which is imported; a silent older version may come first.
        silent = [other for other in others if not other.declared and _identity(other) not in known]
        if silent:
            by_name[key] = sorted(declaring + silent, key=_position)
    return by_name


def _declaring() -> Iterator[Installed]:
    seen: set[str] = set()
    for dist in importlib_metadata.Distribution.discover():
        found = Installed(dist)
        if found.declared and _identity(found) not in seen:
            seen.add(_identity(found))
            yield found


def _identity(found: Installed) -> str:
    return os.path.realpath(found.folder)


def _position(found: Installed) -> int:
    folders = [os.path.realpath(entry or os.getcwd()) for entry in sys.path]
    parent = os.path.realpath(found.parent)
    return folders.index(parent) if parent in folders else len(folders)
