"""`engines checkpoint`: what lies in a folder of checkpoints, whether it is whole, and a Hugging Face folder of one.

Nothing here writes to a checkpoint. `list`, `show` and `verify` import no torch.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

    from engines.checkpoint_folder import Manifest

DAMAGED = 1
"""Exit code of `verify`."""


@click.group(no_args_is_help=True, short_help="List, show, verify and convert checkpoints.")
def checkpoint() -> None:
    """List, show, verify and convert checkpoints.

    PATH: a run's output folder, its checkpoints/, or one checkpoint.
    """
    from engines.cli.packages import check_packages

    check_packages("reading checkpoints")


@checkpoint.command("list")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="One object per checkpoint.")
def list_checkpoints(path: str, as_json: bool) -> None:
    """Which checkpoints lie in PATH, and whether each file is there with its size."""
    from engines.cli.checkpoint_rows import find_rows, render

    rows = find_rows(path)
    click.echo(json.dumps([row.as_json() for row in rows], indent=2) if as_json else render(rows, path))


@checkpoint.command("show")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="All that the manifest says, as one object.")
def show_checkpoint(path: str, as_json: bool) -> None:
    """Everything about one checkpoint; of several the latest complete one.

    Tensors are looked at by the sizes of their files, all else by its checksum; `verify` reads them, too.
    """
    from engines.checkpoint_folder import read_manifest
    from engines.checkpoint_folder.faults import quick_faults
    from engines.cli.checkpoint_rows import find_latest

    folder, later = find_latest(path)
    for line in later:
        click.echo(line, err=True)
    manifest = read_manifest(folder)
    found = quick_faults(folder, manifest)
    if as_json:
        held = {"path": str(folder), "held": manifest.held, "size": manifest.size, "faults": found}
        click.echo(json.dumps({**held, **manifest.model_dump(mode="json")}, indent=2))
    else:
        click.echo("\n".join(_lines(folder, manifest, found)))


@checkpoint.command()
@click.argument("path")
def verify(path: str) -> int:
    """Compare every file of the checkpoints in PATH with its checksum.

    Exit code 0: every complete checkpoint is whole. 1: one is damaged; its files are named. 2: there is no such
    folder. Checkpoints that were never finished are mentioned.
    """
    from engines.checkpoint_folder.faults import faults
    from engines.cli.checkpoint_rows import find_rows, is_step, size_of

    rows = find_rows(path)
    damaged, width = 0, max((len(row.path.name) for row in rows), default=0)
    for row in rows:
        found = list(row.faults)
        if row.status == "complete" and row.manifest is not None:
            found = faults(row.path, row.manifest)
        bad = bool(found) and (row.status != "incomplete" or is_step(path))
        damaged += bad
        status = ("damaged" if row.status != "incomplete" else "incomplete") if found else "whole"
        colour = {"whole": "green", "damaged": "red", "incomplete": "yellow"}[status]
        size = f"  {len(row.manifest.files)} files, {size_of(row.manifest)}" if row.manifest and not found else ""
        click.echo(f"{row.path.name:<{width}}  {click.style(status, fg=colour)}{size}")
        for line in found:
            click.echo(f"  {line}")
    if not rows:
        click.echo(f"{path} holds no checkpoints yet")
    return DAMAGED if damaged else 0


@checkpoint.command()
@click.argument("path")
@click.argument("target")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the floating-point tensors that are written.",
)
def convert(path: str, target: str, dtype: str) -> None:
    """Write the Hugging Face folder TARGET from PATH, which names one checkpoint.

    The folder is what an export of the run at that step would have been. It must not exist, or be empty. No run is
    started, and the engine that saved the checkpoint need not be installed.
    """
    import torch

    from engines.checkpoint.convert import convert as write

    write(path, target, dtype=getattr(torch, dtype))
    click.echo(f"{target}: the weights of {path} as {dtype}")


def _lines(folder: Path, manifest: Manifest, faults: list[str]) -> list[str]:
    from engines.cli.checkpoint_rows import saved_at, size_of

    info = manifest.info
    sizes = {name: value for name, value in info.layout.items() if value not in (1, False)}
    layout = ", ".join(f"{name}={value}" for name, value in sizes.items())
    facts = {
        "status": f"damaged: {'; '.join(faults)}" if faults else "each file has its size; verify compares checksums",
        "saved": f"{saved_at(folder, manifest)}, by {info.backend} on {info.device}",
        "layout": f"{info.world_size} process{'es' if info.world_size > 1 else ''}{f': {layout}' * bool(layout)}",
        "holds": ", ".join(manifest.held),
        "model": f"{info.model.architecture}, a {info.model_type.replace('_', ' ')}",
        "vocabulary": f"tokenizer.json {info.model.tokenizer_xxh3 or 'is not there'}",
        "optimizer": ", ".join(f"{name}={value}" for name, value in (info.optimizer or {}).items()),
        "versions": ", ".join(f"{name} {version}" for name, version in info.distributions.items() if version),
    }
    lines = [f"{folder}: step {info.step}, {size_of(manifest)}"]
    lines += [f"  {name:<12}{fact}" for name, fact in facts.items() if fact]
    width = max(map(len, manifest.files), default=0)
    digits = math.floor(math.log10(max((file.size for file in manifest.files.values()), default=1) or 1)) + 1
    lines.append("  files")
    lines += [f"    {name:<{width}}  {file.size:>{digits}}  {file.xxh3}" for name, file in manifest.files.items()]
    return lines
