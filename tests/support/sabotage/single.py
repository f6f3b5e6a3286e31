"""Engines of one process, each wrong in one way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import (
    BoundLoss,
    EngineContext,
    ExportPlan,
    MicroResult,
    Mode,
    Part,
    Shard,
    ShardReader,
    StepResult,
    hookimpl,
)
from engines.testing.reference.engine import ReferenceEngine


class NormalisesPerMicroBatch(ReferenceEngine):
    """Means of micro-batches are summed, whatever the step's denominator is."""

    def step(self) -> StepResult:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._count)
        return super().step()

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        self._count = len(micro_batches)
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)


class LeaksGraph(ReferenceEngine):
    """The outputs of every micro-batch of a batch are kept until the next batch."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        self._kept: list[TokenOutputs] = []
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        self._kept.append(outputs)
        return outputs


class DrawsInInference(ReferenceEngine):
    """Inference takes a number from torch's generator."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        if forward_only:
            torch.rand(1)
        return super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)


class ForgetsRandomState(ReferenceEngine):
    """Loading a checkpoint seeds torch's generator, after core has restored it or before, as it happens."""

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._seeded = True

    def zero_grad(self) -> None:
        super().zero_grad()
        if getattr(self, "_seeded", False):
            torch.manual_seed(0)
            self._seeded = False


class ReversesMicroBatches(ReferenceEngine):
    """Results come in the order in which the last micro-batch is first."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)[::-1]


class IgnoresClipping(ReferenceEngine):
    """`clip_grad` has no effect."""

    def __init__(self, ctx: EngineContext) -> None:
        if ctx.optimizer is not None:
            ctx = replace(ctx, optimizer=ctx.optimizer.model_copy(update={"clip_grad": None}))
        super().__init__(ctx)


class IgnoresWarmup(ReferenceEngine):
    """The rate begins at its peak."""

    def __init__(self, ctx: EngineContext) -> None:
        if ctx.optimizer is not None:
            ctx = replace(ctx, optimizer=ctx.optimizer.model_copy(update={"warmup_steps": 0}))
        super().__init__(ctx)


class KeepsTrainMode(ReferenceEngine):
    """Once trained, it stays in train mode."""

    def set_mode(self, mode: Mode) -> None:
        if mode == "train" or not self._model.training:
            super().set_mode(mode)


class ExportsTiedHead(ReferenceEngine):
    """A tied head is exported although `save_pretrained` leaves it out."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        seen = set()
        for name, tensor in super().iter_weights(plan):
            seen.add(name)
            yield name, tensor
        if "lm_head.weight" not in seen:
            yield "lm_head.weight", self._model.get_output_embeddings().weight.detach().clone()


class ExportsAtOnce(ReferenceEngine):
    """The stream is made whole before its first tensor is given."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return iter(list(super().iter_weights(plan)))


class IgnoresPlan(ReferenceEngine):
    """Weights leave in float32, whatever is asked for."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return super().iter_weights(replace(plan, dtype=torch.float32))


class MutatesBatch(ReferenceEngine):
    """The first token of each micro-batch is overwritten after its forward."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        micro_batch["input_ids"][0] = 0
        return outputs


class OffByOne(ReferenceEngine):
    """In inference, each log-probability stands one token too early."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        assert outputs.log_probs is not None
        return replace(outputs, log_probs=outputs.log_probs.roll(-1)) if forward_only else outputs


class WrongEntropy(ReferenceEngine):
    """Entropies are in bits."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        return outputs if outputs.entropy is None else replace(outputs, entropy=outputs.entropy / 0.6931)


class SwallowsExceptions(ReferenceEngine):
    """A micro-batch that fails counts as done."""

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        try:
            return super()._run(index, micro_batch, loss, needs, forward_only)
        except RuntimeError:
            return MicroResult({"cross_entropy": torch.zeros((), dtype=torch.float64)})


class LeavesWrapper(ReferenceEngine):
    """The first batch puts a wrapper of its own around the engine."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        if not getattr(self, "_wrapped", False):
            self._wrapped = True
            self._manager().register(_Wrapper())
        return super().forward_backward_batch(micro_batches, loss, needs, forward_only)

    def _manager(self) -> Any:
        import gc

        from engines.engine.binding import EnginePluginManager

        return next(
            one for one in gc.get_objects() if isinstance(one, EnginePluginManager) and self in one.get_plugins()
        )


class _Wrapper:
    @hookimpl(wrapper=True)
    def forward_micro_batch(self) -> Iterator[None]:
        return (yield)


class CountsSkippedSteps(ReferenceEngine):
    """The schedule advances by a step that was skipped."""

    def step(self) -> StepResult:
        result = super().step()
        if result.skipped is not None:
            self.schedule_step()
        return result


class ForgetsOptimizer(ReferenceEngine):
    """The second moment is not restored."""

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        super().load_shards(reader, parts)
        if "optimizer" in parts:
            for name in self._built_optimizer.parameters:
                for moment, value in (self._built_optimizer.moments(name) or {}).items():
                    if moment == "exp_avg_sq":
                        value.zero_()


class SavesHalf(ReferenceEngine):
    """The first weight of a checkpoint is that of the time before the last step."""

    def zero_grad(self) -> None:
        if not hasattr(self, "_stale"):
            self._stale = next(self._model.parameters()).detach().clone()
        super().zero_grad()

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        for place, shard in enumerate(super().shards(parts)):
            yield replace(shard, tensor=self._stale) if place == 0 and hasattr(self, "_stale") else shard


class NeverMoves(ReferenceEngine):
    """Declares offload, and moves gradients away for good."""

    def move(self, device: str, parts: frozenset[Part]) -> None:
        if "grads" in parts:
            self._model.zero_grad(set_to_none=True)


class LeavesDefaultType(ReferenceEngine):
    """The process computes in float64 ever after."""

    def initialize(self) -> None:
        super().initialize()
        torch.set_num_threads(torch.get_num_threads() + 1)


class Grows(ReferenceEngine):
    """Every step leaves half a megabyte."""

    kept: list[Tensor]

    def step(self) -> StepResult:
        self.__dict__.setdefault("kept", []).append(torch.ones(2**18))
        return super().step()


class AnswersFromCache(ReferenceEngine):
    """Inference keeps to the weights with which it first answered."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        if not forward_only:
            return super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        answers = self.__dict__.setdefault("_answers", {})
        key = (tuple(micro_batch["input_ids"].tolist()), self._asked)
        if key not in answers:
            answers[key] = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        return answers[key]
