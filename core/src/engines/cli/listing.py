"""`engines list`: which engines are installed, and which can run here."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap

import click

from engines.capabilities import CAPABILITIES, is_capability
from engines.cli.rows import Row, all_rows
from engines.errors import ConfigError, did_you_mean
from engines.registry import DENIED, registry

COLOURS = {"available": "green", "unavailable": "yellow", "broken": "red"}
HEADINGS = ("BACKEND", "DEVICE", "STATUS")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="One object per backend and device.")
@click.option("--all", "show_all", is_flag=True, help="In the table also those that the deny list names.")
@click.option("--can", metavar="CAPABILITY", help="Only engines that declare this capability.")
def list_engines(as_json: bool, show_all: bool, can: str | None) -> None:
    """Which engines are installed, and which can run here."""
    rows = all_rows(registry)
    if can is not None:
        _check_capability(can, rows)
        rows = [row for row in rows if can in row.capabilities]
    if as_json:
        click.echo(json.dumps([row.as_json() for row in rows], indent=2))
        return
    shown = [row for row in rows if show_all or row.reason != DENIED]
    hidden = len(rows) - len(shown)
    if shown or not hidden:
        click.echo(render(shown, _width()))
    if hidden:
        click.echo(f"{hidden} more are denied (ENGINES_DENY); `engines list --all` shows them.")


def render(rows: list[Row], width: int) -> str:
    """The table, no line of it longer than `width`."""
    if not rows:
        return "No engine is installed. Try: pip install engines-fsdp"
    sizes = [
        max(len(heading), *(len(cell) for cell in column)) + 2
        for heading, column in zip(
            HEADINGS,
            ([row.backend for row in rows], [row.device or "-" for row in rows], [row.status for row in rows]),
            strict=True,
        )
    ]
    indent = sum(sizes)
    lines = ["".join(heading.ljust(size) for heading, size in zip(HEADINGS, sizes, strict=True)).rstrip()]
    before = None
    for row in rows:
        backend = "" if before == (row.backend, row.distribution) else row.backend
        head = backend.ljust(sizes[0]) + (row.device or "-").ljust(sizes[1])
        head += click.style(row.status.ljust(sizes[2]), fg=COLOURS[row.status])
        first, *rest = textwrap.wrap(_details(row, first=bool(backend)), max(width - indent, 20)) or [""]
        lines.append((head + first).rstrip())
        lines.extend(" " * indent + line for line in rest)
        before = (row.backend, row.distribution)
    return "\n".join(lines)


def _details(row: Row, first: bool) -> str:
    """Why not and what to do; else what it is, said once for all its devices."""
    if row.status == "broken":
        return f"{row.owner}, {row.manifest}: {row.reason}; {row.remedy}"
    owner = f"{row.owner}: " if first else ""
    if row.status == "unavailable":
        return f"{owner}{row.reason}; {row.remedy}"
    return owner + f"{row.summary} ({', '.join(row.model_types)})"


def _check_capability(word: str, rows: list[Row]) -> None:
    declared = {capability for row in rows for capability in row.capabilities}
    if word not in declared and not is_capability(word):
        raise ConfigError(
            f'"{word}" is not a capability.{did_you_mean(word, declared | set(CAPABILITIES))}',
            f"Known: {', '.join(CAPABILITIES)}.",
        )


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 80
