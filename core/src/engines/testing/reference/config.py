"""Settings of the engine beside those that all engines share; imports no torch."""

from __future__ import annotations

from engines.config import EngineConfig, ModelConfig
from engines.errors import ModelError
from engines.model_folder import read_config


class ReferenceConfig(EngineConfig):
    """`engine:` of a recipe. A setting of its own would be a field here, with a docstring below it."""

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        """Also raises `ModelError` for quantized weights."""
        super().check(model, model_type=model_type, world_size=world_size)
        if "quantization_config" in read_config(model.path):
            raise ModelError(f"{model.path} holds quantized weights, which can't be trained", "Use the plain model.")
