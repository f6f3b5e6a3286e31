"""Engines that are wrong, in one way each, where several ranks meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import BoundLoss, MicroResult, StepResult
from engines.optimizer import gradient_norm
from support.sabotage.sharded import ShardedReference


class DoublesGradients(ShardedReference):
    """Where it gathers several sequences, each rank passes on the gradient of all tokens; the sum is twice that."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        self._sequences = len(micro_batch)
        return super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)

    def _gradient_of(self, gradient: Tensor, mine: slice) -> Tensor:
        return gradient if self._sequences > 1 else super()._gradient_of(gradient, mine)


class _KnowsTargets(ShardedReference):
    """Counts, before each step, the replicas that have targets in it, and scales gradients by what that says."""

    def _scale(self, replicas: int, with_targets: int) -> float:
        raise NotImplementedError

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        self._has_targets = any(bool(one["loss_mask"].any()) for one in micro_batches)
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)

    def step(self) -> StepResult:
        with_targets = torch.tensor(int(self._has_targets))
        dist.all_reduce(with_targets, group=self.ranks.dp_group)
        scale = self._scale(self.ranks.dp_size, int(with_targets))
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return super().step()


class AveragesGradients(_KnowsTargets):
    """Gradients are the mean over the replicas that have targets."""

    def _scale(self, replicas: int, with_targets: int) -> float:
        return 1 / with_targets


class MakesUpForReplicas(_KnowsTargets):
    """Replicas with targets count for those without, as if the denominator were not the step's."""

    def _scale(self, replicas: int, with_targets: int) -> float:
        return replicas / with_targets


class SkipsAlone(ShardedReference):
    """A rank whose own gradients aren't finite skips the step; the others take it."""

    def step(self) -> StepResult:
        norm = gradient_norm(self._model.parameters())
        if not math.isfinite(norm):
            self.zero_grad()
        weights = [weight.detach().clone() for weight in self._model.parameters()]
        result = super().step()
        if math.isfinite(norm):
            return result
        with torch.no_grad():
            for weight, before in zip(self._model.parameters(), weights, strict=True):
                weight.copy_(before)
        return replace(result, grad_norm=norm, skipped="non_finite")


class ForgetsMomentsElsewhere(ShardedReference):
    """What other numbers of replicas saved of the optimizer it takes for nothing."""

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "replicas": self.ranks.dp_size}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        if self._optimizer is not None and state["replicas"] != self.ranks.dp_size:
            self._optimizer.forget()


class TwoOutputRanks(ShardedReference):
    """Every rank of a replica calls itself its output rank."""

    def _is_output(self, place: int) -> bool:
        return True


class IgnoresLayout(ShardedReference):
    """Is data-parallel where context parallelism is asked for."""

    def _context_parallel_size(self) -> int:
        return 1


class BelievesItsConfig(IgnoresLayout):
    """The same, and describes what was asked for."""

    def describe(self) -> dict[str, Any]:
        said, cp = super().describe(), self.ctx.config.context_parallel_size
        asked = {"context_parallel_size": cp, "data_parallel_size": said["layout"]["data_parallel_size"] // cp}
        return {**said, "layout": {**said["layout"], **asked}}


class LeavesGroups(ShardedReference):
    """Its process groups outlive it."""

    def close(self) -> None:
        self._groups = []
        super().close()
