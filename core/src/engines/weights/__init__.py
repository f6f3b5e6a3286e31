"""Weights on their way in, and out to a Hugging Face folder. `engines.checkpoint.open_weights` opens any kind."""

from __future__ import annotations

from engines.weights.model_files import ModelFiles
from engines.weights.pretrained_folder import PretrainedFolder
from engines.weights.reader import WeightsReader
from engines.weights.write_pretrained import write_pretrained

__all__ = ["ModelFiles", "PretrainedFolder", "WeightsReader", "write_pretrained"]
