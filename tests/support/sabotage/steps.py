"""Engines of one process whose numbers are wrong in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import BoundLoss, EngineContext, MicroResult, StepResult
from engines.testing.reference.engine import ReferenceEngine


class NormalisesPerMicroBatch(ReferenceEngine):
    """The gradient is the mean over micro-batches of the gradients of their means."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        if loss is not None and not forward_only:
            loss = _Means(loss, micro_batches)
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)


class _Means:
    """A loss that undoes the step's denominator and takes each micro-batch's own."""

    def __init__(self, loss: BoundLoss, micro_batches: Sequence[Batch]) -> None:
        self.needs = loss.needs
        self._loss = loss
        self._count = len(micro_batches)
        self._targets = sum(int(one["loss_mask"].sum()) for one in micro_batches)

    def __call__(self, outputs: TokenOutputs, micro_batch: Batch) -> tuple[Tensor, MicroResult]:
        scaled, result = self._loss(outputs, micro_batch)
        own = max(int(micro_batch["loss_mask"].sum()), 1)
        return scaled * (self._targets / (own * self._count)), result


class TakesWeightsForEqual(ReferenceEngine):
    """Differentiates every loss as if all of a micro-batch's targets counted alike."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        if not forward_only and outputs.log_probs is not None:
            outputs.log_probs.register_hook(_mean_of_targets)
        return outputs


def _mean_of_targets(gradient: Tensor) -> Tensor:
    targets = gradient != 0
    return targets * gradient.sum() / targets.sum().clamp(min=1)


class _Ignores(ReferenceEngine):
    """Takes a value of its own for a setting of the optimizer."""

    instead: dict[str, Any]

    def __init__(self, ctx: EngineContext) -> None:
        if ctx.optimizer is not None:
            ctx = replace(ctx, optimizer=ctx.optimizer.model_copy(update=self.instead))
        super().__init__(ctx)


class IgnoresClipping(_Ignores):
    """`clip_grad` is 1, whatever it is."""

    instead = {"clip_grad": 1.0}  # noqa: RUF012 (nobody changes it)


class IgnoresDecay(_Ignores):
    """Weights don't decay."""

    instead = {"weight_decay": 0.0}  # noqa: RUF012


class IgnoresWarmup(_Ignores):
    """The rate begins at its peak."""

    instead = {"warmup_steps": 0}  # noqa: RUF012


class CountsSkippedSteps(ReferenceEngine):
    """The schedule advances by a step that was skipped."""

    def step(self) -> StepResult:
        result = super().step()
        if result.skipped is not None:
            self.schedule_step()
        return result


class EvaluatesOtherwise(ReferenceEngine):
    """Losses are those of training and a thousandth more where nothing is trained."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        results = super().forward_backward_batch(micro_batches, loss, needs, forward_only)
        if not forward_only:
            return results
        return [replace(one, terms={name: 1.001 * term for name, term in one.terms.items()}) for one in results]
