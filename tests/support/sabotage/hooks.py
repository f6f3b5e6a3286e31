"""Engines of one process that misuse hooks, modes and what is handed to them, in one way each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import BoundLoss, MicroResult, Mode, hookimpl
from engines.testing.reference.engine import ReferenceEngine


class KeepsTrainMode(ReferenceEngine):
    """Once it trains, dropout stays on."""

    def set_mode(self, mode: Mode) -> None:
        if mode == "train" or not getattr(self, "_trains", False):
            super().set_mode(mode)
        self._trains = mode == "train" or getattr(self, "_trains", False)


class SwitchesTheTop(ReferenceEngine):
    """A mode reaches the model, and none of its modules."""

    def set_mode(self, mode: Mode) -> None:
        self._model.training = mode == "train"


class DrawsInInference(ReferenceEngine):
    """Inference takes a number from torch's generator."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        if forward_only:
            torch.rand(())
        return super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)


class DropsGradientsInInference(ReferenceEngine):
    """Makes room for inference with what waits for a step."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        if forward_only:
            self.zero_grad()
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)


class MutatesBatch(ReferenceEngine):
    """Overwrites the first token of each micro-batch when it is done with it."""

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        result = super()._run(index, micro_batch, loss, needs, forward_only)
        micro_batch["input_ids"][0] = 0
        return result


class BypassesHook(ReferenceEngine):
    """Calls its own method in inference, around which nothing stands."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        through = self.ctx
        if forward_only:
            self.ctx = replace(through, hook=SimpleNamespace(forward_micro_batch=self.forward_micro_batch))
        try:
            return super().forward_backward_batch(micro_batches, loss, needs, forward_only)
        finally:
            self.ctx = through


class ReturnsGraphs(ReferenceEngine):
    """What it tells of a training pass holds on to the graph."""

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        result = super()._run(index, micro_batch, loss, needs, forward_only)
        if forward_only:
            return result
        weight: Tensor = next(self._model.parameters())
        return replace(result, metrics={"reference/first_weight": weight.flatten()[0]})


class LeavesWrapper(ReferenceEngine):
    """Its first batch puts a wrapper around the engine, for good."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        if not hasattr(self, "_wrapper"):
            self._wrapper = _Wrapper()
            manager: Any = self.ctx.hook.forward_micro_batch._hookexec.__self__
            manager.register(self._wrapper)
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)


class _Wrapper:
    @hookimpl(wrapper=True)
    def forward_micro_batch(self) -> Iterator[None]:
        return (yield)


class SwallowsExceptions(ReferenceEngine):
    """A micro-batch that fails in training counts as done."""

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        try:
            return super()._run(index, micro_batch, loss, needs, forward_only)
        except RuntimeError:
            if forward_only:
                raise
            return MicroResult({})
