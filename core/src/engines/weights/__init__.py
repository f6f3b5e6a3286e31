"""Weights on their way in from a Hugging Face folder and out to one."""

from __future__ import annotations

from engines.weights.pretrained_folder import PretrainedFolder, read_config

__all__ = ["PretrainedFolder", "read_config"]
