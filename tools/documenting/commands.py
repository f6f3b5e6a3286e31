"""The commands: their help, and what they print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import click

from documenting import ROOT
from engines.cli.main import COMMANDS, engines

WIDTH = 88


def commands_help() -> str:
    """Every command with its help, without the keys of recipes, which have a page of their own."""
    return "\n".join(
        f"{'#' * len(ctx.command_path.split())} {ctx.command_path}\n\n```text\n{help_text(ctx)}```\n"
        for ctx in every_command()
    )


def every_command() -> Iterator[click.Context]:
    """A context of every command, each group before the commands in it."""
    top = click.Context(engines, info_name="engines", help_option_names=["-h", "--help"], terminal_width=WIDTH)
    for name in COMMANDS:
        module, _, attribute = COMMANDS[name][0].partition(":")
        yield from _with_inner(getattr(import_module(module), attribute), name, top)


def _with_inner(one: click.Command, name: str, parent: click.Context) -> Iterator[click.Context]:
    ctx = click.Context(one, info_name=name, parent=parent)
    yield ctx
    for inner, command in getattr(one, "commands", {}).items():
        yield from _with_inner(command, inner, ctx)


def help_text(ctx: click.Context) -> str:
    """Usage, text and options of a command."""
    formatter = ctx.make_formatter()
    for part in (ctx.command.format_usage, ctx.command.format_help_text, ctx.command.format_options):
        part(ctx, formatter)
    return formatter.getvalue()


def command_output(line: str) -> str:
    """What a command prints on a machine without accelerators; an error is part of it."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"},
    )
    assert done.returncode in (0, 2), done.stderr
    return f"```console\n$ {line}\n{(done.stdout + done.stderr).replace(f'{ROOT}/', '')}```\n"
