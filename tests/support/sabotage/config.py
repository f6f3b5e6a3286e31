"""Settings of a sound engine that builds few models, and settings that are wrong in one way each."""

from __future__ import annotations

from pydantic import ConfigDict

from engines.config import ModelConfig
from engines.errors import ModelError
from engines.model_folder import read_config
from engines.testing.reference.config import ReferenceConfig


class OnlyLlama(ReferenceConfig):
    """One family is enough to catch what these engines do, and the kit takes half the time."""

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        super().check(model, model_type=model_type, world_size=world_size)
        family = read_config(model.path)["model_type"]
        if family != "llama":
            raise ModelError(f"{model.path} is a {family}, not a llama", "Use a model of that family.")


class KeepsAllActivations(OnlyLlama):
    """Sound: what it is registered with declares a capability that the engine does nothing for."""


class ForgetsCapability(OnlyLlama):
    """Declares a setting anew, and with that forgets which capability it needs."""

    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass."""


class TakesAnything(OnlyLlama):
    """Lets settings through that nobody knows."""

    model_config = ConfigDict(extra="ignore")


class SaysNothing(OnlyLlama):
    """A setting without a word on it."""

    speed: int = 1


class ImportsTorch(OnlyLlama):
    """Its check takes seconds, for torch."""

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        import torch

        assert torch.float32
        super().check(model, model_type=model_type, world_size=world_size)
