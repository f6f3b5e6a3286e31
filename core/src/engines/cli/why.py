"""`engines why`: which engine a backend means here, and why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from engines.errors import EngineNotFound, EnginesError
from engines.registry import Selection, registry
from engines.selection import Consideration


@click.command
@click.argument("model_type")
@click.argument("backend", required=False)
@click.option("--device", help="The device, instead of the best that is present.")
@click.option("--json", "as_json", is_flag=True, help="The choice and each candidate as one object.")
def why(model_type: str, backend: str | None, device: str | None, as_json: bool) -> int:
    """Which engine BACKEND means here for MODEL_TYPE (language_model, value_model), and why.

    BACKEND may be spelt name@distribution. Without it: what a recipe gets that names no strategy.
    """
    try:
        selection = registry.resolve(model_type, backend, device)
    except EnginesError as error:
        if not as_json:
            raise
        trace = error.trace if isinstance(error, EngineNotFound) else ()
        click.echo(json.dumps({"selected": None, "error": str(error), "candidates": _json(trace)}, indent=2))
        return 2
    if as_json:
        answer = {"selected": _selected(selection), "error": None, "candidates": _json(selection.trace)}
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(selection.explain())
    return 0


def _selected(selection: Selection) -> dict[str, Any]:
    words = ("model_type", "backend", "device", "device_reason", "distribution", "version", "plugin", "priority")
    return {word: getattr(selection, word) for word in (*words, "engine", "config", "manifest")}


def _json(trace: Iterable[Consideration]) -> list[dict[str, Any]]:
    return [asdict(one) for one in trace]
