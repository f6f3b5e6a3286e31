"""Which versions decide a run's numbers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def deciding_versions(owner: str) -> dict[str, str]:
    """Versions of core, of the engine's distribution `owner`, of torch and transformers; "" if not installed."""
    return {name: _version(name) for name in ("engines-core", owner, "torch", "transformers")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # an engine that was registered in-process belongs to no distribution
        return ""
