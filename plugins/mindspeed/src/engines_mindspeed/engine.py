"""Megatron's engine on Megatron-Core as MindSpeed patches it."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from engines.contract import EngineContext
from engines_megatron.engine import MegatronEngine
from engines_mindspeed import arguments
from engines_mindspeed.config import MindSpeedConfig


class MindSpeedEngine(MegatronEngine):
    """The same engine, with MindSpeed's arguments in force before Megatron's groups are made."""

    def __init__(self, ctx: EngineContext) -> None:
        assert isinstance(ctx.config, MindSpeedConfig)
        self._arguments = ctx.config.arguments()
        self._flash_attention = ctx.config.flash_attention
        arguments.acquire(self._arguments)
        self._holds_arguments = True
        try:
            super().__init__(ctx)
        except BaseException:
            self._release_arguments()
            raise

    def close(self) -> None:
        super().close()
        self._release_arguments()

    def _transformer_config(self) -> TransformerConfig:
        config = super()._transformer_config()
        for name, value in self._arguments.items():
            # MindSpeed's patches read arguments here, where it has put its defaults and not what it was given
            setattr(config, name, value)
        return config

    @property
    def _core_attention(self) -> type[Module] | None:
        """Megatron's own where MindSpeed has replaced its computation."""
        return None if self._flash_attention else super()._core_attention

    def _release_arguments(self) -> None:
        if self._holds_arguments:
            self._holds_arguments = False
            arguments.release()
