"""What everybody who loads weights needs of them, wherever they lie."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.weights.safetensors_file import Index


class WeightsReader(Protocol):
    """Tensors by name, read by slices: of a Hugging Face folder (`PretrainedFolder`), or of a checkpoint.

    Made by `engines.checkpoint.open_weights`. Every method raises `EnginesError` naming what is missing or damaged.
    """

    path: Path
    """The folder."""
    config: dict[str, Any]
    """Its config.json."""
    is_checkpoint: bool
    """Names are then those of the engine that saved: Hugging Face's, or the parameters' of the transformers model."""

    def keys(self) -> Set[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as stored."""

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A tensor, or the part of it at `index` (slices of step 1), on the CPU as stored; nothing else is read."""

    def close(self) -> None:
        """Unmap the files."""
