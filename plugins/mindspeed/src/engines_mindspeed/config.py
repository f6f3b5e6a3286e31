"""Settings of the Megatron engine on NPUs beside those that it has everywhere; imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from engines_megatron.config import MegatronConfig

Argument = bool | int | float | str | None

CUT_OTHERWISE = ("ulysses_cp_algo", "hybrid_cp_algo")
"""MindSpeed's algorithms that hand out each sequence in another way than the engine's rows."""


class MindSpeedConfig(MegatronConfig):
    """`engine:` of a recipe whose strategy is megatron, on an NPU."""

    flash_attention: bool = True
    """Attend with MindSpeed's fused kernel; false: with torch's scaled_dot_product_attention, as on other devices."""
    context_parallel_algorithm: Literal["megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"] = "megatron_cp_algo"
    """MindSpeed's way of attending across context-parallel ranks. Only its ring, megatron_cp_algo, takes sequences as
    this engine cuts them. Without flash_attention keys and values are gathered, as on other devices."""
    mindspeed: dict[str, Argument] = Field({})
    """More of MindSpeed's arguments by its own names, with underscores. An unknown name is refused, and so is one
    that follows from another key."""

    @model_validator(mode="after")
    def _sequences_are_cut_for_it(self) -> MindSpeedConfig:
        if self.context_parallel_algorithm in CUT_OTHERWISE:
            raise ValueError(
                f"context_parallel_algorithm: {self.context_parallel_algorithm} expects sequences cut in another way "
                "than this engine cuts them; leave it out, or write megatron_cp_algo"
            )
        return self

    @model_validator(mode="after")
    def _overrides_are_free(self) -> MindSpeedConfig:
        for name in self.mindspeed:
            if name in OWNERS:
                raise ValueError(f"mindspeed.{name} follows from {OWNERS[name]}; set that")
        return self

    def arguments(self) -> dict[str, Argument]:
        """Every argument that MindSpeed is given, by its own names: always all, as it keeps what it isn't given."""
        return {**self._own_arguments(), **self.mindspeed}

    def _own_arguments(self) -> dict[str, Any]:
        return {
            "use_flash_attn": self.flash_attention,
            "attention_mask_type": "causal",
            # causal from a small mask; MindSpeed sets it itself, but on the first model of a process only
            "sparse_mode": 2 if self.flash_attention else 0,
            "context_parallel_size": self.context_parallel_size,
            "context_parallel_algo": self.context_parallel_algorithm,
        }


OWNERS = {
    "use_flash_attn": "flash_attention",
    "attention_mask_type": "flash_attention",
    "sparse_mode": "flash_attention",
    "context_parallel_size": "context_parallel_size",
    "context_parallel_algo": "context_parallel_algorithm",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "sequence_parallel": "sequence_parallel",
}
"""Arguments of MindSpeed that other keys decide, and which."""
