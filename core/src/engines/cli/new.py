"""`engines new`: the beginning of a plugin."""

from __future__ import annotations

from pathlib import Path

import click

from engines.registry import registry
from engines.scaffold import Names, new_plugin


@click.command
@click.argument("name")
@click.option(
    "--device",
    metavar="NAME",
    default="cpu",
    show_default=True,
    help="Where it runs; one that nobody knows is described by the plugin, and is host memory at first.",
)
def new(name: str, device: str) -> None:
    """Make engines-NAME/, a distribution whose engine passes the conformance kit at once.

    NAME chooses it in recipes. It is plain transformers in one process, to be replaced part by part.
    """
    names = Names(name, device)
    made = new_plugin(names, Path(), registry)
    click.echo(f"Made {made}/, whose engine is plain transformers in one process. Next:\n")
    here = f"ENGINES_DEVICE={device} " if names.has_own_device else ""
    for command in (f"cd {made}", "pip install --editable '.[dev]'", f"{here}engines list", "pytest"):
        click.echo(f"  {command}")
    click.echo(f"\nThen make src/{names.package}/engine.py your own; the kit says what the contract wants.")
