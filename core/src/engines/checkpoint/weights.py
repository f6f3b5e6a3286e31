"""The weights behind `model.path`: of a Hugging Face folder, or of any engine's checkpoint."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.checkpoint.reading import Checkpoint
from engines.checkpoint.reading import open as open_checkpoint
from engines.checkpoint_folder import is_checkpoint, needed_for_weights, why_no_model
from engines.durable import local_folder
from engines.errors import ModelError
from engines.model_folder import read_config
from engines.weights import PretrainedFolder, WeightsReader
from engines.weights.safetensors_file import Index

PREFIX = "model."


def open_weights(path: str | Path, *, group: ProcessGroup | None = None) -> WeightsReader:
    """Open what `path` names for reading. Every rank of `group` (None: all) calls this, in `initialize`.

    Of a checkpoint everything but optimizer and rank state is verified first; ranks share that work. Raises
    `ModelError` for a folder that holds no model, and `CheckpointError`, on every rank, for a checkpoint that is
    incomplete or damaged.
    """
    folder = local_folder(path, error=ModelError)
    if error := why_no_model(folder):
        raise error
    if not is_checkpoint(folder):
        return PretrainedFolder(folder)
    return CheckpointWeights(open_checkpoint(folder, group=group, needed=needed_for_weights))


class CheckpointWeights:
    """`WeightsReader` of a checkpoint: the tensors saved as `model.NAME`, whatever layout wrote them, by NAME."""

    is_checkpoint = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.config = read_config(self.path)
        self._reader = checkpoint.reader(["model"])
        self._keys = self._reader.keys()

    def keys(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(key.removeprefix(PREFIX) for key in self._keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises `CheckpointError` with the closest name if it is unknown."""
        return self._reader.shape(PREFIX + name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as stored: float32, if an engine of this project saved it."""
        return self._reader.dtype(PREFIX + name)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A tensor, or the part of it at `index`, on the CPU as stored; reads the pieces that it meets."""
        extents = [
            range(*(part or slice(None)).indices(size))
            for size, part in zip_longest(self.shape(name), index or ())
        ]  # fmt: skip
        offset, shape = [part.start for part in extents], [len(part) for part in extents]
        return self._reader.read(PREFIX + name, offset, shape)

    def close(self) -> None:
        """Unmap the files."""
        self._reader.close()
