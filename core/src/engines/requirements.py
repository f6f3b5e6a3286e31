"""What a distribution requires, held against what is installed. Read from metadata alone.

As for `pip check`, a marker that does not hold here takes its requirement away, a local version (`2.13.0+cpu`) counts
as the version that it was built from, and a pre-release counts where it stands in the order: `0.17.0rc1` is not below
0.17 for PEP 440, and not yet 0.17 either.

packaging is imported late: what answers from manifests alone has no use for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.discovery.metadata import installed
from engines.errors import ContractError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True)
class Unmet:
    """A requirement that what is installed does not meet."""

    requirement: Requirement
    found: tuple[str, ...]
    """The versions that are installed: none, one, or several after an interrupted upgrade."""

    def __str__(self) -> str:
        if not self.found:
            return f"{spelt(self.requirement)}, not installed"
        return f"{spelt(self.requirement)}, found {' and '.join(version or 'no version' for version in self.found)}"


def unmet(distribution: str, extra: str = "") -> list[Unmet]:
    """Requirements of a distribution that are missing here or installed in another version; see `requirements`."""
    found = {spelt(one): _unmet(one) for one in requirements(distribution, extra)}
    return [one for one in found.values() if one is not None]


def out_of_range(versions: Mapping[str, str]) -> list[Unmet]:
    """Of ranges by the distribution's name, those that what is installed does not meet."""
    from packaging.requirements import Requirement

    found = [_unmet(Requirement(f"{name}{range}")) for name, range in versions.items()]
    return [one for one in found if one is not None]


def requirements(distribution: str, extra: str = "") -> Iterator[Requirement]:
    """What a distribution itself requires on this platform, or what its `extra` adds to that.

    Included is what the extras that it asks of others add: `engines-core[train]` requires torch. What its
    requirements require for themselves is between them and pip. Of a distribution that is not installed, nothing.
    Raises ContractError for a requirement that cannot be read.
    """
    seen: set[tuple[str, str]] = set()
    waiting = [(distribution, extra)]
    while waiting:
        name, extra = asked = waiting.pop(0)
        if asked in seen:  # extras may ask for each other
            continue
        seen.add(asked)
        for one in direct(name, extra):
            yield one
            waiting += [(one.name, more) for more in sorted(one.extras)]


def install(wanted: Iterable[Requirement]) -> str:
    """The command that brings requirements."""
    return " ".join(["pip install", *(f'"{spelt(one)}"' for one in wanted)])


def install_module(module: str, distribution: str) -> str:
    """What brings a module that a plugin of `distribution` needs and that cannot be found."""
    from packaging.utils import canonicalize_name

    names = {canonicalize_name(module), canonicalize_name(module.partition(".")[0])}
    for one in requirements(distribution):
        if canonicalize_name(one.name) in names:  # installed, as far as its metadata goes
            return f'pip install --force-reinstall --no-deps "{spelt(one)}"'
    for extra in [extra for found in installed(distribution) for extra in found.extras]:
        if any(canonicalize_name(one.name) in names for one in requirements(distribution, extra)):
            return f'pip install "{distribution}[{extra}]"'
    return f"install the package that brings {module}"


def spelt(requirement: Requirement) -> str:
    """A requirement without its marker, lower bounds first."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    bounds = sorted(map(str, requirement.specifier), key=lambda bound: (bound[0] in "<!", bound))
    return f"{requirement.name}{extras}{','.join(bounds)}" + (f" @ {requirement.url}" if requirement.url else "")


def direct(distribution: str, extra: str = "") -> Iterator[Requirement]:
    """The lines of a distribution's own metadata that hold on this platform; see `requirements`."""
    from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
    from packaging.requirements import InvalidRequirement, Requirement

    for text in [text for found in installed(distribution)[:1] for text in found.requires]:
        try:
            one = Requirement(text)
            without, wanted = (one.marker is None or one.marker.evaluate({"extra": word}) for word in ("", extra))
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName) as error:
            raise ContractError(
                f'{distribution} requires "{text}", which cannot be read: {str(error).splitlines()[0]}',
                f"upgrade {distribution}, or tell its author",
            ) from None
        if wanted and not (extra and without):
            yield one


def _unmet(requirement: Requirement) -> Unmet | None:
    found = tuple(sorted({one.version for one in installed(requirement.name)}))
    met = found and all(_fits(requirement, version) for version in found)
    return None if met else Unmet(requirement, found)


def _fits(requirement: Requirement, version: str) -> bool:
    """Whether a version is in the range. One that is empty is what an interrupted installation left."""
    from packaging.version import InvalidVersion, Version

    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return bool(version) and not requirement.specifier
