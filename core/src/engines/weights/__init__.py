"""Weights on their way in from a Hugging Face folder and out to one."""

from __future__ import annotations

from engines.weights.pretrained_folder import PretrainedFolder
from engines.weights.write_pretrained import write_pretrained

__all__ = ["PretrainedFolder", "write_pretrained"]
