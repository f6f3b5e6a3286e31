"""What an output folder may hold of others, which a run there would write over. Imports no torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from engines.errors import ConfigError
from engines.model_folder import CONFIG, why_not_replaced

ELSEWHERE: Final = "Move it away, or choose another trainer.output_dir."
WRITTEN: Final = "# The resolved recipe of a run, written by engines train: the next run here writes it anew.\n"
"""First line of a run's recipe.yaml. It tells it from one of the user's, also where the run came no further."""


def check_no_model(folder: Path, *, holds_run: bool) -> None:
    """Raise `ConfigError` if an output folder is a model's: another run's export, or a download."""
    weights = next(folder.glob("*.safetensors"), None)
    found = weights or (folder / CONFIG if (folder / CONFIG).exists() and not holds_run else None)
    if found is not None:
        raise ConfigError(
            f"trainer.output_dir: {folder} is a model's folder: it holds {found.name}",
            "Choose another trainer.output_dir.",
        )


def check_recipe(file: Path, *, holds_run: bool) -> None:
    """Raise `ConfigError` if the recipe.yaml that a run would write anew was written by a user.

    Of a folder that `holds_run` it is the run's, also one from before it said so.
    """
    if file.exists() and not holds_run and not _is_written(file):
        raise ConfigError(
            f"trainer.output_dir: {file} was not written by a run, and the run would write over it",
            "Choose another trainer.output_dir, or give the file another name.",
        )


def check_export(export: Path, model: Path) -> None:
    """Raise `ConfigError` if the export at the end would have to delete `model`, which is trained, or no export."""
    if export.exists() and model.exists() and export.samefile(model):
        raise ConfigError(
            f"trainer.output_dir: the export would take the place of model.path, {model}",
            "Choose another trainer.output_dir; or set trainer.export=false, and have the trained model written"
            " elsewhere by engines checkpoint convert CHECKPOINT TARGET.",
        )
    if why := why_not_replaced(export):
        raise ConfigError(
            f"trainer.output_dir: {why}",
            "Move it away, choose another trainer.output_dir, or set trainer.export=false.",
        )


def _is_written(file: Path) -> bool:
    """What can't be read isn't known to be a run's."""
    try:
        return file.is_file() and file.read_bytes().startswith(WRITTEN.encode())
    except OSError:
        return False


def convert_command(checkpoint: Path, target: Path, dtype: str) -> str:
    """What writes to `target` what an export at `checkpoint` would have been."""
    precision = () if dtype == "float32" else ("--dtype", dtype)
    return shlex.join(["engines", "checkpoint", "convert", str(checkpoint), str(target), *precision])
