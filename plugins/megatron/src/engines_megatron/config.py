"""Settings of the Megatron engine beside those that all engines share; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from engines.config import EngineConfig, ModelConfig, Positive, needs
from engines.model_folder import CONFIG, read_config


class MegatronConfig(EngineConfig):
    """`engine:` of a recipe whose strategy is megatron."""

    distributed_optimizer: bool = needs(
        "distributed_optimizer",
        False,
        "Shard the optimizer's state, and the float32 parameters that it updates, over the data-parallel ranks "
        "instead of keeping a copy on each: less memory, and parameters are gathered after each step.",
    )
    pipeline_layers: tuple[Positive, ...] | None = needs(
        "pipeline_parallel",
        None,
        "Decoder layers of each model chunk in order of depth, virtual_pipeline_parallel_size numbers a stage; "
        "chunk i is on stage i modulo pipeline_parallel_size. null: as even as possible, later chunks fewer.",
    )
    recompute: Literal["selective", "full"] = needs(
        "activation_checkpointing",
        "full",
        "What activation_checkpointing recomputes: full, whole layers; selective, their core attention alone.",
    )

    @model_validator(mode="after")
    def _recompute_something(self) -> MegatronConfig:
        if self.recompute != "full" and not self.activation_checkpointing:
            raise ValueError(
                f"recompute: {self.recompute} says what activation_checkpointing recomputes, and that is false; "
                "set it to true, or leave recompute out"
            )
        return self

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        """Raises `ModelError` for a model that isn't built, `ConfigError` for a layout that Megatron can't run."""
        from engines_megatron.architectures import read_architecture
        from engines_megatron.layout import plan_layout

        architecture = read_architecture(read_config(model.path), Path(model.path) / CONFIG)
        plan_layout(self, architecture, world_size)
