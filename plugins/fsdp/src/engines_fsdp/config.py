"""Settings of the FSDP2 engine beside those that all engines share; imports no torch."""

from __future__ import annotations

from typing import Literal

from engines.config import EngineConfig, ModelConfig
from engines.errors import ConfigError


class FSDP2Config(EngineConfig):
    """`engine:` of a recipe whose strategy is fsdp2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward and gather them again for its backward; false
    keeps them, which saves an all-gather per layer and micro-batch and costs the memory of the whole model."""
    accumulate_gradients: Literal["whole", "sharded"] = "whole"
    """What a rank holds between micro-batches of a step: whole gradients, reduced once at the last one, or
    its shards alone, reduced at every one: more communication, less memory."""

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        """Also raises `ConfigError` where the replicas don't divide the processes."""
        super().check(model, model_type=model_type, world_size=world_size)
        replicas = self.data_parallel_replicate_size
        if world_size % replicas:
            divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
            raise ConfigError(
                f"engine.data_parallel_replicate_size: {replicas} replicas don't divide {world_size} processes",
                f"Use one of {', '.join(map(str, divisors))}, or a multiple of {replicas} processes (launch.nproc).",
            )
