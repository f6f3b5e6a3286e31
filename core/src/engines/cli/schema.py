"""`engines schema`: JSON Schema of what people write."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import click

from engines.errors import ConfigError, EngineNotFound, did_you_mean
from engines.registry import registry

MODELS = {"manifest": "engines.manifest:Manifest", "recipe": "engines.recipes.sft.config:SFTRecipe"}


@click.command
@click.argument("name", metavar="manifest|recipe|engine:BACKEND")
def schema(name: str) -> None:
    """JSON Schema of the plugin manifest, of a training recipe, or of one engine's settings."""
    kind, _, backend = name.partition(":")
    if kind == "engine" and backend:
        click.echo(json.dumps(_settings_schema(backend), indent=2))
    elif name in MODELS:
        module, _, attribute = MODELS[name].partition(":")
        click.echo(json.dumps(getattr(import_module(module), attribute).model_json_schema(), indent=2))
    else:
        words = (*MODELS, "engine:BACKEND")
        raise ConfigError(f'There is no schema "{name}".{did_you_mean(name, words)}', f"Known: {', '.join(words)}.")


def _settings_schema(backend: str) -> Any:
    """Asked of a process of its own, since an engine's settings are its plugin's code."""
    from engines.cli.probe import settings_schema

    word, _, owner = backend.partition("@")
    owners = [one for one in registry.candidates() if one.backend == word and owner in ("", one.distribution)]
    if not owners:
        known = sorted({one.backend for one in registry.candidates()})
        raise EngineNotFound(
            f'No installed engine has the backend "{backend}".{did_you_mean(word, known)}',
            f"Installed: {', '.join(known) or 'none'}.",
        )
    return settings_schema(max(owners, key=lambda one: one.priority), registry)
