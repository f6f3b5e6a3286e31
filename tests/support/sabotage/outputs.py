"""Engines of one process that answer wrongly, in one way each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import BoundLoss, MicroBatchRules, MicroResult
from engines.testing.reference.engine import ReferenceEngine


class OffByOne(ReferenceEngine):
    """What is inferred stands one token too early."""

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        result = super()._run(index, micro_batch, loss, needs, forward_only)
        if result.outputs is None or result.outputs.log_probs is None:
            return result
        return replace(result, outputs=replace(result.outputs, log_probs=result.outputs.log_probs.roll(-1)))


class SortsSequences(ReferenceEngine):
    """What is inferred stands in the order of lengths."""

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        result = super()._run(index, micro_batch, loss, needs, forward_only)
        if result.outputs is None or result.outputs.log_probs is None:
            return result
        ordered = torch.cat(sorted(result.outputs.log_probs.split(micro_batch.lengths), key=len))
        return replace(result, outputs=replace(result.outputs, log_probs=ordered))


class TellsEntropyInBits(ReferenceEngine):
    """In units of its own."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        return outputs if outputs.entropy is None else replace(outputs, entropy=outputs.entropy / math.log(2))


class TellsValuesLate(ReferenceEngine):
    """What a token is worth stands with the token, and not with that which it leads to."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        return outputs if outputs.values is None else replace(outputs, values=outputs.values.roll(-1))


class AnswersFromCache(ReferenceEngine):
    """What it has once inferred for some tokens it says for ever."""

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


class SkipsFillers(ReferenceEngine):
    """Runs nothing where there is nothing to learn, and has no result of it."""

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        real = [one for one in micro_batches if not one.is_filler]
        return super().forward_backward_batch(real, loss, needs, forward_only)


class GuessesLoneTokens(ReferenceEngine):
    """Has a probability for the token of a sequence that holds no other."""

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        assert outputs.log_probs is not None
        lone = [length == 1 for length in micro_batch.lengths for _ in range(length)]
        return replace(outputs, log_probs=outputs.log_probs - torch.tensor(lone, dtype=torch.float32))


class UnderstatesRows(ReferenceEngine):
    """Says that its micro-batches take half the rows that they take."""

    def micro_batch_rules(self, forward_only: bool) -> MicroBatchRules:
        return MicroBatchRules(rows=lambda lengths: sum(lengths) // 2)
