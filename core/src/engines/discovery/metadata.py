"""What installed distributions say about themselves: who declares an entry point of the group `engines`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from urllib.parse import unquote, urlparse

import importlib_metadata

GROUP = "engines"
_HEADER = re.compile(r"^(Name|Version|Requires-Dist|Provides-Extra):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


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
    def _headers(self) -> list[tuple[str, str]]:
        """Headers of METADATA or PKG-INFO that are of use here; none where an interrupted installation left no file.

        All of them are single lines, so that the email package need not be imported for them.
        """
        text = self.dist.read_text("METADATA") or self.dist.read_text("PKG-INFO") or ""
        return _HEADER.findall(text.replace("\r\n", "\n").partition("\n\n")[0])

    def _header(self, key: str) -> str:
        return next((value for found, value in self._headers if found == key), "")

    @cached_property
    def name(self) -> str:
        """The distribution's name; the folder's where the metadata has none."""
        return self._header("Name") or os.path.basename(self.folder).split("-")[0].replace("_", "-")

    @property
    def version(self) -> str:
        """The version, or an empty string where the metadata has none."""
        return self._header("Version")

    @property
    def requires(self) -> list[str]:
        """What it requires, each requirement as it was written."""
        if self.is_egg_info:  # which may keep them in a file of their own
            return list(self.dist.requires or ())
        return [value for key, value in self._headers if key == "Requires-Dist"]

    @property
    def extras(self) -> list[str]:
        """The extras that it provides."""
        return [value for key, value in self._headers if key == "Provides-Extra"]

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


def current(versions: Sequence[Installed]) -> list[Installed]:
    """Which of the metadata folders of one distribution, in the path's order, say what an import would find.

    As for an import, the first on the path wins. An `.egg-info` is what old or editable builds leave in the sources:
    beside a `.dist-info` it counts for nothing. More than one are the remains of an interrupted upgrade, of which
    nobody can say which code lies there.
    """
    dist_infos = [found for found in versions if not found.is_egg_info]
    if not dist_infos:
        return list(versions[:1])
    return [found for found in dist_infos if found.parent == dist_infos[0].parent]


@cache
def installed(name: str) -> list[Installed]:
    """The metadata folders that count of the distribution `name`: one, or none where it is not installed.

    Remembered, since every plugin asks for the same; `installed.cache_clear()` looks again.
    """
    return current([Installed(dist) for dist in importlib_metadata.Distribution.discover(name=name)])


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
