"""From a checkpoint to a Hugging Face folder, without a run and without the engine that saved it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.checkpoint.weights import CheckpointWeights, open_weights
from engines.checkpoint_folder import enclosing, is_checkpoint, look, why_no_model
from engines.durable import local_folder
from engines.errors import CheckpointError, ModelError
from engines.models import build_causal_lm, export_plan, load_plan
from engines.weights import ModelFiles, WeightsReader, write_pretrained


def convert(source: str | Path, target: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write what an export at that step would have been, to `target`, which must not exist or be empty.

    Called by one process. `source`: one checkpoint, of any engine and layout. Tensors are read one by one, or, where
    the model fuses several, as many as it fuses; beside them one file of the folder is in memory. What is read is
    verified first. Raises `CheckpointError` for a checkpoint that is incomplete or damaged, `ModelError` for one
    whose weights transformers can't name, and for a `target` that holds anything, or would lie among checkpoints.
    """
    path = local_folder(source, error=CheckpointError)
    folder = local_folder(target, error=ModelError)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder} already holds something", "name an empty or new folder")
    if around := enclosing(folder):
        raise ModelError(f"{folder} would lie in {around}, where checkpoints alone do", "name a folder elsewhere")
    if error := why_no_model(path):
        raise type(error)(error.message.removeprefix("model.path: "), error.remedy)
    if not is_checkpoint(path):
        if path.exists():
            raise CheckpointError(f"{path} is {'a file, not a folder' if path.is_file() else 'no checkpoint'}")
        raise CheckpointError(f"there is no checkpoint {path}")
    model_type = look(path).model_type
    weights = open_weights(path)
    assert isinstance(weights, CheckpointWeights)
    try:
        write_pretrained(
            _stream(_structure(path, model_type), weights),
            source=ModelFiles.read(path),
            target=folder,
            dtype=dtype,
            is_writer=True,
            model_type=model_type,
        )
    finally:
        weights.close()


def _structure(path: Path, model_type: str) -> Any:
    """The transformers model on "meta": it knows what its weights are called in a folder."""
    if model_type != "value_model":
        return build_causal_lm(path).model
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, num_labels=1)
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    except (ValueError, OSError) as cause:
        raise ModelError(f"transformers builds no value model from {path}/config.json: {cause}") from cause


def _stream(model: Any, weights: WeightsReader) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), in the order of the model's weights."""
    sources = load_plan(model, weights)
    for group in export_plan(model):
        full = {
            name: sources[name].read((0,) * len(sources[name].shape), sources[name].shape) for name in group.names
        }
        yield from group.tensors(full)
