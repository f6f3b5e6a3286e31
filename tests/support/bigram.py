"""A real engine as small as one can be: log p(token | the token before it) from a table, one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from engines.batch import Batch, TokenOutputs
from engines.config import PARALLEL_SIZES, EngineConfig
from engines.contract import (
    BaseEngine,
    BoundLoss,
    EngineContext,
    ExportPlan,
    MicroBatchRules,
    MicroResult,
    Mode,
    Part,
    Ranks,
    Shard,
    ShardReader,
    StepResult,
)
from engines.optimizer import Optimizer
from engines.registry import Registration, registry

VOCAB = 16
KEYS = {"backend": "bigram", "model_type": "language_model", "device": "cpu", "priority": 1}
MODEL = {"path": "no-folder-is-read"}


class BigramEngine(BaseEngine):
    """Trains a `[VOCAB, VOCAB]` table of logits; `calls` holds the name of every hook that ran, in order."""

    rules = MicroBatchRules()

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        self.ranks = Ranks(0, 1, None, None, 0, True)
        self.calls: list[str] = []

    @property
    def lr(self) -> float:
        return self._optimizer.schedule.lr

    def initialize(self) -> None:
        self.calls.append("initialize")
        generator = torch.Generator().manual_seed(0)
        self._model = nn.Sequential(nn.Embedding(VOCAB, VOCAB), nn.Dropout(0.0))
        nn.init.normal_(self._model[0].weight, generator=generator)
        if self.ctx.optimizer is not None:
            self._optimizer = Optimizer({"table": self._model[0].weight}, self.ctx.optimizer, self.ctx.total_steps)

    def set_mode(self, mode: Mode) -> None:
        self.calls.append(mode)
        self._model.train(mode == "train")

    def micro_batch_rules(self, forward_only: bool) -> MicroBatchRules:
        return self.rules

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> list[MicroResult]:
        results = []
        for index, micro_batch in enumerate(micro_batches):
            outputs = self.ctx.hook.forward_micro_batch(
                chunk=self._model, chunk_index=0, index=index, micro_batch=micro_batch, forward_only=forward_only
            )
            if loss is None:
                results.append(MicroResult({}, outputs.keep(needs)))
                continue
            total, result = loss(outputs, micro_batch)
            if not forward_only:
                total.backward()
            results.append(result)
        return results

    def forward_micro_batch(
        self, chunk: nn.Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        self.calls.append("forward")
        ids = micro_batch["input_ids"]
        scores = chunk(ids.roll(1)).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        return TokenOutputs(log_probs=torch.where(micro_batch.position_ids > 0, scores, 0))

    def step(self) -> StepResult:
        self.calls.append("step")
        return self._optimizer.step()

    def schedule_step(self) -> float:
        return self._optimizer.schedule.step()

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        yield "table", self._model[0].weight.detach()

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        yield Shard("model.table", (VOCAB, VOCAB), (0, 0), self._model[0].weight.detach())

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        self._model[0].weight.data.copy_(reader.read("model.table", (0, 0), (VOCAB, VOCAB)))

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        assert state == {}

    def describe(self) -> dict[str, Any]:
        layout = {**dict.fromkeys(PARALLEL_SIZES, 1), "data_parallel_size": 1}
        return {"layout": layout, "parameters": VOCAB * VOCAB}

    def close(self) -> None:
        self.calls.append("close")


def registered(engine: type[BaseEngine] = BigramEngine, **fields: Any) -> AbstractContextManager[Registration]:
    """`engine` under the backend word `bigram`, for the length of a `with` block."""
    return registry.registered(
        **{**KEYS, "engine": engine, "config": EngineConfig, "capabilities": ["export"], **fields}
    )


def sequences(*lengths: int) -> Batch:
    """A batch of ascending tokens in which every token is a target."""
    rows = [{"input_ids": [(start + i) % VOCAB for i in range(n)]} for start, n in enumerate(lengths)]
    return Batch.from_sequences([{**row, "loss_mask": [True] * len(row["input_ids"])} for row in rows])
