"""Settings of the Megatron engine beside those that all engines share; imports no torch."""

from __future__ import annotations

from typing import Literal

from engines.config import EngineConfig, Positive


class MegatronConfig(EngineConfig):
    """`engine:` of a recipe whose strategy is megatron."""

    distributed_optimizer: bool = False
    """Shard optimizer state and the main parameters over the data-parallel ranks."""
    pipeline_layers: tuple[Positive, ...] | None = None
    """Decoder layers of each model chunk in order of depth, pipeline stages times chunks per stage; null: as even
    as possible, later chunks fewer."""
    recompute: Literal["selective", "full"] = "full"
    """What `activation_checkpointing` recomputes: the core attention alone, or whole layers."""
