"""Settings of the FSDP2 engine beside those that all engines share; imports no torch."""

from __future__ import annotations

from typing import Literal

from engines.config import EngineConfig


class FSDP2Config(EngineConfig):
    """`engine:` of a recipe whose strategy is fsdp2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward and gather them again for its backward; false
    keeps them, which saves an all-gather per layer and micro-batch and costs the memory of the whole model."""
    accumulate_gradients: Literal["whole", "sharded"] = "whole"
    """What a rank holds between micro-batches of a step: whole gradients, reduced once at the last one, or
    its shards alone, reduced at every one: more communication, less memory."""
