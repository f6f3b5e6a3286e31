"""The commands: their help, and what they print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import import_module

import click

from documenting import ROOT
from engines.cli.main import COMMANDS, engines

WIDTH = 88


def commands_help() -> str:
    """Every command with its help, without the keys of recipes, which have a page of their own."""
    return "\n".join(f"## engines {name}\n\n```text\n{help_text(name)}```\n" for name in COMMANDS)


def command(name: str) -> click.Command:
    """The click command of that name."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: click.Command = getattr(import_module(module), attribute)
    return found


def help_text(name: str) -> str:
    """Usage, text and options of a command."""
    one = command(name)
    group = click.Context(engines, info_name="engines", help_option_names=["-h", "--help"])
    ctx = click.Context(one, info_name=name, parent=group, terminal_width=WIDTH)
    formatter = ctx.make_formatter()
    for part in (one.format_usage, one.format_help_text, one.format_options):
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
