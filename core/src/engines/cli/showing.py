"""`engines show`: everything about one engine."""

from __future__ import annotations

import click

from engines.capabilities import CAPABILITIES
from engines.discovery import Broken
from engines.errors import EngineNotFound, did_you_mean
from engines.registry import Candidate, registry


@click.command
@click.argument("engine", metavar="BACKEND[:DEVICE]")
def show(engine: str) -> None:
    """Everything about one engine: its owner, where it runs, what it can do and what it needs."""
    backend, _, device = engine.partition(":")
    found = [one for one in registry.candidates() if one.backend == backend and device in ("", one.device)]
    broken = [one for one in registry.broken() if _concerns(one, backend)]
    if not found and not broken:
        raise _unknown(engine, backend, device)
    blocks = ["\n".join(_lines(one)) for one in found] + [f"broken  {one}" for one in broken]
    click.echo("\n\n".join(blocks))


def _concerns(broken: Broken, backend: str) -> bool:
    entries = broken.plugin.manifest.engine if broken.plugin else ()
    return backend == broken.entry_point or any(backend in entry.backend for entry in entries)


def _lines(one: Candidate) -> list[str]:
    state = registry.availability(one)
    status = state.status if state.available else f"{state.status}: {state.reason}; {state.remedy}"
    facts = {
        "status": status,
        "owner": f"{one.distribution} {one.version}".rstrip() + _home_page(one.distribution),
        "model types": ", ".join(one.model_types),
        "priority": str(one.priority),
        "needs": ", ".join(one.needs),
        "environment": ", ".join(f"{name}={value}" for name, value in one.env.items()),
        "process": "must be alone in it" if one.process == "exclusive" else "",
        "prepared by": _prepared(one),
        "engine": str(one.engine),
        "settings": str(one.config),
        "manifest": one.manifest,
    }
    lines = [f"{one.backend} on {one.device}", f"  {one.summary}"]
    lines += [f"  {name:<13} {fact}" for name, fact in facts.items() if fact]
    if one.capabilities:
        lines.append("  capabilities")
        size = max(map(len, one.capabilities))
        lines += [f"    {word:<{size}}  {CAPABILITIES.get(word, '')}".rstrip() for word in sorted(one.capabilities)]
    return lines


def _prepared(one: Candidate) -> str:
    if one.prepare is None:
        return ""
    return f"{one.prepare}" + (f", before {', '.join(one.before)} is imported" if one.before else "")


def _home_page(distribution: str) -> str:
    from importlib_metadata import PackageNotFoundError, metadata

    try:
        urls = metadata(distribution).get_all("Project-URL") or []
    except PackageNotFoundError:  # registered in this process
        return ""
    pages = [
        url.partition(",")[2].strip() for url in urls if url.lower().startswith(("home", "repository", "source"))
    ]
    return f" ({pages[0]})" if pages else ""


def _unknown(engine: str, backend: str, device: str) -> EngineNotFound:
    known = sorted({one.backend for one in registry.candidates()})
    devices = sorted({one.device for one in registry.candidates() if one.backend == backend})
    if devices:
        said = (
            f'{backend} does not run on "{device}".{did_you_mean(device, devices)} It runs on {", ".join(devices)}.'
        )
        return EngineNotFound(said)
    said = f'No installed engine has the backend "{backend}".{did_you_mean(backend, known)}'
    return EngineNotFound(said, f"Installed: {', '.join(known) or 'none'}. `engines list` shows all.")
