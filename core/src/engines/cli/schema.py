"""`engines schema`: JSON Schema of what people write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from engines.errors import ConfigError, EngineNotFound, did_you_mean
from engines.registry import Candidate, registry

MODELS = {"manifest": "engines.manifest:Manifest", "recipe": "engines.recipes.sft.config:SFTRecipe"}


@click.command
@click.argument("name", metavar="manifest|recipe|engine:BACKEND")
@click.option("--device", help="Of an engine: the device, instead of the best that is present.")
def schema(name: str, device: str | None) -> None:
    """JSON Schema of the plugin manifest, of a training recipe, or of one engine's settings.

    One word may mean engines with other settings on other devices; `$comment` says whose these are.
    """
    kind, _, backend = name.partition(":")
    if kind == "engine" and backend:
        click.echo(json.dumps(_settings_schema(backend, device), indent=2))
    elif device is not None:
        raise ConfigError(f"--device {device}: only an engine's settings depend on a device", "leave it out")
    elif name in MODELS:
        module, _, attribute = MODELS[name].partition(":")
        click.echo(json.dumps(getattr(import_module(module), attribute).model_json_schema(), indent=2))
    else:
        words = (*MODELS, "engine:BACKEND")
        raise ConfigError(f'There is no schema "{name}".{did_you_mean(name, words)}', f"Known: {', '.join(words)}.")


def _settings_schema(backend: str, device: str | None) -> dict[str, Any]:
    """Asked of a process of its own, since an engine's settings are its plugin's code."""
    from engines.cli.probe import settings_schema

    word, _, owner = backend.partition("@")
    owners = [one for one in registry.candidates() if one.backend == word and owner in ("", one.distribution)]
    if not owners:
        known = sorted({one.backend for one in registry.candidates()})
        raise EngineNotFound(
            f'No installed engine has the backend "{backend}".{did_you_mean(backend, known)}',
            f"Installed: {', '.join(known) or 'none'}.",
        )
    meant = _meant(owners, backend, device)
    return {"$comment": _whose(meant, owners), **settings_schema(meant, registry)}


def _meant(owners: Sequence[Candidate], backend: str, device: str | None) -> Candidate:
    """The one that `engines why` would choose, or whose lack it would name."""
    from engines.choosing import ask, best_device

    asked = ask(owners[0].model_types[0], backend, device, None)
    name, _ = best_device(asked, owners, registry.devices())
    here = [one for one in owners if one.device == name]
    if not here:
        supported = sorted({one.device for one in owners})
        raise EngineNotFound(
            f'{backend} does not run on "{name}" ({asked.device_by}).{did_you_mean(name, supported)}',
            f"It runs on {', '.join(supported)}.",
        )
    able = [one for one in here if registry.availability(one).available]
    return max(able or here, key=lambda one: one.priority)


def _whose(meant: Candidate, owners: Sequence[Candidate]) -> str:
    """Whose settings these are, and on which devices the same word has others."""
    alike = [one.device for one in owners if one.config == meant.config]
    others: dict[str, list[str]] = {}
    for one in owners:
        if one.config != meant.config:
            others.setdefault(one.distribution, []).append(one.device)
    said = f"{meant.backend} on {', '.join(alike)} ({meant.distribution} {meant.version})"
    return "; ".join([said, *(f"--device {' or '.join(on)} shows those of {by}" for by, on in others.items())])
