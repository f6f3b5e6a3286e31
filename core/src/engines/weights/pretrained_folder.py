"""A Hugging Face model folder and its weights, sliced on demand."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint_folder import PRETRAINED
from engines.errors import ModelError, did_you_mean
from engines.model_folder import read_config, read_object
from engines.weights.safetensors_file import Index, SafetensorsFile

WEIGHTS, WEIGHTS_INDEX = PRETRAINED
OTHER_FORMATS = frozenset({".bin", ".gguf", ".pt", ".pth"})


class PretrainedFolder:
    """The weights of a model folder, one file or sharded. Nothing is read before it is asked for.

    Any process opens its own. Raises `ModelError`, naming the file, for a folder that doesn't exist, holds no
    weights, lacks a shard, or has one that is truncated or contradicts the index.
    """

    is_checkpoint = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self._files: dict[str, SafetensorsFile] = {}
        self._homes = self._find_weights()

    def keys(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises `ModelError` with the closest name if it is unknown."""
        return self._home(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as stored."""
        return self._home(name).dtype(name)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A tensor, or the part of it at `index`, on the CPU in its stored dtype; nothing else is read."""
        return self._home(name).read(name, index)

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _find_weights(self) -> dict[str, str]:
        if (self.path / WEIGHTS).exists():
            return dict.fromkeys(self._open(WEIGHTS).keys(), WEIGHTS)
        if (self.path / WEIGHTS_INDEX).exists():
            return self._read_index()
        others = [file.name for file in self.path.iterdir() if file.suffix in OTHER_FORMATS]
        remedy = "download the model's weights into it, or mend model.path"
        if others:
            remedy = f"convert {', '.join(sorted(others))} by from_pretrained and save_pretrained of transformers"
        raise ModelError(f"{self.path} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}", remedy)

    def _read_index(self) -> dict[str, str]:
        file = self.path / WEIGHTS_INDEX
        index = read_object(file)
        homes = index.get("weight_map")
        if not isinstance(homes, dict) or not all(isinstance(home, str) for home in homes.values()):
            raise ModelError(f"{file} has no weight_map of tensor names to file names")
        for shard in sorted(set(homes.values())):
            file = self.path / shard
            if "/" in shard or not file.is_file():
                raise ModelError(f"{file} is missing; {WEIGHTS_INDEX} names it")
            absent = {name for name, home in homes.items() if home == shard} - self._open(shard).keys()
            if absent:
                raise ModelError(f"{file} lacks {_some(absent)}, which {WEIGHTS_INDEX} says it holds")
        return homes

    def _home(self, name: str) -> SafetensorsFile:
        if name not in self._homes:
            raise ModelError(f"{self.path} has no weight {name!r}.{did_you_mean(name, self._homes)}")
        return self._open(self._homes[name])

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._files:
            self._files[file] = SafetensorsFile(self.path / file, error=ModelError)
        return self._files[file]


def _some(names: set[str], most: int = 3) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
