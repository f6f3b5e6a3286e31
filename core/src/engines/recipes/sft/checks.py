"""What is checked before torch is imported and before anything is written."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engines.checkpoint_folder import STATE, read_manifest, strict_json
from engines.checkpoint_folder.identity import check_goes_on, differences, fingerprint, identity
from engines.configuring import check_processes
from engines.devices import DEVICE_VARIABLE, DeviceSpec, named_device
from engines.errors import CheckpointError, DataError, LaunchError, ModelError
from engines.model_folder import read_config
from engines.recipes.data import Limits, scan
from engines.recipes.model_folder import ModelFolder, inspect_model
from engines.recipes.output.folder import OutputFolder
from engines.recipes.output.loggers import check_installed
from engines.recipes.sft.config import DataConfig, SFTRecipe, TrainerConfig
from engines.recipes.sft.loading import MODEL_TYPE
from engines.registry import registry
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
    OutputFolder(output_dir(recipe)).check_writable()
    model = inspect_model(model_dir(recipe), MODEL_TYPE)
    recipe.engine.check(recipe.model, model_type=MODEL_TYPE, world_size=num_ranks)
    check_processes(
        recipe.engine,
        num_ranks,
        engine=selection.backend,
        capabilities=selection.capabilities,
        others=registry.engines_with,
    )
    limits = data_limits(recipe, model.vocab_size)
    with named("data.train"):
        num_samples = _check_data(recipe.data.train, model, limits)
    if recipe.data.eval is not None:
        with named("data.eval"):
            _check_data(recipe.data.eval, model, limits)
    return Checked(num_samples, total_steps(recipe.trainer, num_samples), model)


def check_resumable(recipe: SFTRecipe, selection: Selection, checkpoint: Path | None) -> None:
    """Raise `CheckpointError`, a line per difference, if `checkpoint` is of another engine, model or optimizer.

    So is one of another order of samples; whether they are others is known when they are read.
    """
    if checkpoint is None:
        return
    manifest = read_manifest(checkpoint)
    check_goes_on(checkpoint, manifest)
    run = strict_json.read(checkpoint / STATE).get("run", {})
    order = {key: getattr(recipe.trainer, key) for key in _ORDER if key in run}
    tokenizer = model_dir(recipe) / "tokenizer.json"
    model = fingerprint(read_config(model_dir(recipe)), tokenizer.read_bytes() if tokenizer.is_file() else None)
    now = {
        "engine": selection.backend,
        "model": model.config,
        "model_type": MODEL_TYPE,
        "vocabulary (tokenizer.json)": model.tokenizer_xxh3,
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "trainer": order,
    }
    found = differences({**identity(manifest.info), "trainer": {key: run[key] for key in order}}, now)
    if found:
        raise CheckpointError(
            f"{checkpoint} belongs to another run:\n  " + "\n  ".join(found),
            "Mend the recipe, or start a new run in another trainer.output_dir.",
        )


_ORDER = ("mini_batch_size", "shuffle", "seed")
"""Settings of the trainer that decide which samples a step sees."""


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


@contextmanager
def named(key: str) -> Iterator[None]:
    """Put the key that names a data file before what is wrong with it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {error.message}", error.remedy) from None


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
    """More processes than devices; on the CPU any number runs."""
    count = _count_devices(device)
    if count is not None and num_ranks > count:
        raise LaunchError(
            f"{num_ranks} processes need a {device.name} device each, and {count} can be seen here",
            f"Lower launch.nproc to at most {count}, or {_instead(device)}.",
        )


def _instead(device: DeviceSpec) -> str:
    """How to run without it."""
    if named_device() == device.name:
        return f"unset {DEVICE_VARIABLE}, which asks for {device.name} and outranks the recipe"
    return "use engine.device=cpu"


def _count_devices(device: DeviceSpec) -> int | None:
    """Devices of this kind on this machine; None where that can't be known without its driver."""
    if device.visible_devices_env is None:
        return None
    visible = os.environ.get(device.visible_devices_env)
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    numbered = [pattern for pattern in device.nodes if "[0-9]" in pattern]
    return len({node for pattern in numbered for node in glob.glob(pattern)}) or None
