"""What is checked before torch is imported and before anything is written."""

from __future__ import annotations

import glob
import math
import os
from dataclasses import dataclass
from pathlib import Path

from engines.availability import can_be_imported
from engines.devices import DeviceSpec
from engines.errors import CheckpointError, DataError, LaunchError, ModelError
from engines.recipes.data import Limits, scan
from engines.recipes.model_folder import ModelFolder, inspect_model
from engines.recipes.output.folder import OutputFolder, checkpoint_settings
from engines.recipes.output.loggers import check_installed
from engines.recipes.sft.config import DataConfig, SFTRecipe, TrainerConfig
from engines.recipes.sft.loading import MODEL_TYPE
from engines.selection import Selection


@dataclass(frozen=True)
class Checked:
    """What the checks found out on their way."""

    num_samples: int
    total_steps: int
    model: ModelFolder


def check(recipe: SFTRecipe, selection: Selection, num_ranks: int) -> Checked:
    """Look at everything that the recipe names. Raises `EnginesError` for the first thing that can't work."""
    _check_devices(selection.device_spec, num_ranks)
    check_installed(recipe.trainer.loggers)
    folder = OutputFolder(output_dir(recipe))
    folder.check_writable()
    if recipe.trainer.export:
        folder.check_export()
    model = inspect_model(model_dir(recipe))
    recipe.engine.check(recipe.model, model_type=MODEL_TYPE, world_size=num_ranks)
    limits = data_limits(recipe, model.vocab_size)
    num_samples = _check_data(recipe.data.train, model, limits)
    if recipe.data.eval is not None:
        _check_data(recipe.data.eval, model, limits)
    return Checked(num_samples, total_steps(recipe.trainer, num_samples), model)


def check_resumable(recipe: SFTRecipe, selection: Selection, checkpoint: Path | None) -> None:
    """Raise `CheckpointError`, a line per difference, if `checkpoint` is of another engine, optimizer or order."""
    saved = checkpoint_settings(checkpoint) if checkpoint is not None else None
    if saved is None:
        return
    backend, before, run = saved
    now = recipe.optimizer.model_dump(mode="json")
    faults = [f"engine: {backend} in the checkpoint, {selection.backend} in this run"] * (
        backend != selection.backend
    )
    faults += [
        f"optimizer.{key}: {before.get(key)} in the checkpoint, {now.get(key)} in this run"
        for key in [*now, *(key for key in before if key not in now)]
        if before.get(key) != now.get(key)
    ]
    faults += [
        f"trainer.{key}: {run[key]} in the checkpoint, {value} in this run"
        for key in ("mini_batch_size", "shuffle", "seed")
        if key in run and run[key] != (value := getattr(recipe.trainer, key))
    ]
    if faults:
        raise CheckpointError(
            f"{checkpoint} belongs to another run:\n  " + "\n  ".join(faults),
            "Mend the recipe, or start a new run in another trainer.output_dir.",
        )


def model_dir(recipe: SFTRecipe) -> Path:
    """The folder of the model to start from."""
    return Path(recipe.model.path)


def output_dir(recipe: SFTRecipe) -> Path:
    """The folder to write to."""
    return Path(recipe.trainer.output_dir).expanduser()


def data_limits(recipe: SFTRecipe, vocab_size: int) -> Limits:
    """What every sample must keep to."""
    data: DataConfig = recipe.data
    return Limits(
        vocab_size=vocab_size,
        max_length=data.max_length,
        truncate=data.overlong == "truncate",
        max_tokens_per_micro_batch=recipe.engine.max_tokens_per_micro_batch,
    )


def total_steps(trainer: TrainerConfig, num_samples: int) -> int:
    """Length of the run in optimizer steps."""
    if trainer.steps is not None:
        return trainer.steps
    assert trainer.epochs is not None
    return math.ceil(trainer.epochs * num_samples / trainer.mini_batch_size)


def _check_data(file: str, model: ModelFolder, limits: Limits) -> int:
    path = Path(file).expanduser()
    summary = scan(path, limits)
    if summary.needs_tokenizer and not model.has_tokenizer:
        raise ModelError(
            f"{path} holds text, but {model.path} has no tokenizer",
            "Add the model's tokenizer files, or give the data as input_ids.",
        )
    if "messages" in summary.kinds and not model.has_chat_template:
        raise DataError(
            f"{path} holds messages, but the tokenizer in {model.path} has no chat template",
            "Use the tokenizer of an instruction-tuned model, or give the data as prompt and response.",
        )
    return summary.num_samples


def _check_devices(device: DeviceSpec, num_ranks: int) -> None:
    """A module that torch needs for it, and more processes than devices; on the CPU any number runs."""
    if not can_be_imported(device.module):
        raise LaunchError(
            f'device "{device.name}" needs the module {device.module}, which is not installed',
            f"Install the package that brings {device.module}, or use engine.device=cpu.",
        )
    count = _count_devices(device)
    if count is not None and num_ranks > count:
        raise LaunchError(
            f"{num_ranks} processes need a {device.name} device each, and {count} can be seen here",
            f"Lower launch.nproc to at most {count}, or use engine.device=cpu.",
        )


def _count_devices(device: DeviceSpec) -> int | None:
    """Devices of this kind on this machine; None where that can't be known without its driver."""
    if device.visible_devices_env is None:
        return None
    visible = os.environ.get(device.visible_devices_env)
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    numbered = [pattern for pattern in device.nodes if "[0-9]" in pattern]
    return len({node for pattern in numbered for node in glob.glob(pattern)}) or None
