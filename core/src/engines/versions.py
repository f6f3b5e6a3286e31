"""Which versions decide a run's numbers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from engines.requirements import direct


def deciding_versions(owner: str) -> dict[str, str]:
    """Versions of core, torch and transformers, of the engine's distribution `owner` and what that itself requires.

    "" for one that is not installed.
    """
    required = [requirement.name for requirement in direct(owner)]
    return {
        name: _version(name) for name in dict.fromkeys(("engines-core", owner, "torch", "transformers", *required))
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # an engine that was registered in-process belongs to no distribution
        return ""
