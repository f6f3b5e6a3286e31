"""Engines of one process that hold on to what is not theirs, in one way each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import BoundLoss, EngineContext, MicroResult, StepResult
from engines.optimizer import Optimizer
from engines.testing.reference.engine import ReferenceEngine


class LeaksGraph(ReferenceEngine):
    """Outputs of a batch's micro-batches live until the next batch."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        self._outputs: list[TokenOutputs] = []
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        self._outputs.append(outputs)
        return outputs


class Grows(ReferenceEngine):
    """Every step leaves 100 kB."""

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        self._left: list[Tensor] = []

    def step(self) -> StepResult:
        self._left.append(torch.ones(25_000))
        return super().step()


class KeepsItsModel(ReferenceEngine):
    """Models go to a list of the class, and stay there."""

    models: ClassVar[list[Any]] = []

    def initialize(self) -> None:
        super().initialize()
        self.models.append(self._model)


class SharesOptimizer(ReferenceEngine):
    """The optimizer is the class's: that of the engine which was made last."""

    newest: ClassVar[Optimizer | None] = None

    def initialize(self) -> None:
        super().initialize()
        type(self).newest = self._optimizer

    def step(self) -> StepResult:
        assert self.newest is not None
        return self.newest.step()

    def close(self) -> None:
        type(self).newest = None
        super().close()


class SharesHook(ReferenceEngine):
    """Forwards go through the hook of the engine which was made last, with whatever stands around that."""

    newest: ClassVar[EngineContext | None] = None

    def initialize(self) -> None:
        super().initialize()
        type(self).newest = self.ctx

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        assert self.newest is not None
        own, self.ctx = self.ctx, self.newest
        try:
            return super().forward_backward_batch(micro_batches, loss, needs, forward_only)
        finally:
            self.ctx = own


class AlwaysHoldsGradients(ReferenceEngine):
    """Has room for gradients, trained or not."""

    def initialize(self) -> None:
        super().initialize()
        self._room = [torch.zeros_like(weight) for weight in self._model.parameters()]


class SetsEnvironment(ReferenceEngine):
    """Switches off, for the whole process, a warning that it can't stand."""

    def initialize(self) -> None:
        super().initialize()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
