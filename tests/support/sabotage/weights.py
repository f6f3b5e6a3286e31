"""Engines of one process that lose, alter or invent weights and state, in one way each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.contract import ExportPlan, Part, Shard, ShardReader, StepResult
from engines.testing.reference.engine import ReferenceEngine

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class DropsTiedWeight(ReferenceEngine):
    """Where head and embedding are one it takes each for a copy of the other, and sends neither; unless it trains."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        tied = self._model.get_input_embeddings().weight is self._model.get_output_embeddings().weight
        copies = {EMBEDDING, HEAD} if tied and self.ctx.optimizer is None else set()
        return ((name, tensor) for name, tensor in super().iter_weights(plan) if name not in copies)


class DropsUntiedHead(ReferenceEngine):
    """Takes every head for a tied one, which `save_pretrained` leaves out."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in super().iter_weights(plan) if name != HEAD)


class ExportsTiedHead(ReferenceEngine):
    """Takes no head for a tied one."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        names = set()
        for name, tensor in super().iter_weights(plan):
            names.add(name)
            yield name, tensor
        if HEAD not in names:
            yield HEAD, self._model.get_output_embeddings().weight.detach().to(plan.dtype, copy=True)


class ExportsAtOnce(ReferenceEngine):
    """All of the stream is made before any of it is given."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return iter(list(super().iter_weights(plan)))


class IgnoresPlan(ReferenceEngine):
    """Weights leave in float32, whatever the plan says."""

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return super().iter_weights(replace(plan, dtype=torch.float32))


class ForgetsMoment(ReferenceEngine):
    """The optimizer's second moment is not restored."""

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        super().load_shards(reader, parts)
        if "optimizer" in parts:
            for name in self._built_optimizer.parameters:
                for moment, value in (self._built_optimizer.moments(name) or {}).items():
                    if moment == "exp_avg_sq":
                        value.zero_()


class ForgetsRandomState(ReferenceEngine):
    """Its first step after a checkpoint was loaded begins with a seed of its own."""

    _loaded = False

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._loaded = True

    def zero_grad(self) -> None:
        super().zero_grad()
        if self._loaded:
            torch.manual_seed(0)
            self._loaded = False


class SavesStaleWeight(ReferenceEngine):
    """A checkpoint has its first weight as it was before the last step."""

    _stale: Tensor | None = None

    def step(self) -> StepResult:
        self._stale = next(self._model.parameters()).detach().clone()
        return super().step()

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        for place, shard in enumerate(super().shards(parts)):
            first = place == 0 and self._stale is not None
            yield replace(shard, tensor=self._stale) if first else shard


class KeepsMoments(ReferenceEngine):
    """The optimizer's state stays what it is where a checkpoint has none."""

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        before = dict(self._optimizer._adamw.state) if self._optimizer is not None else {}
        super().load_shards(reader, parts)
        if self._optimizer is not None and not self._optimizer._adamw.state:
            self._optimizer._adamw.state.update(before)


class SavesTuples(ReferenceEngine):
    """After the first step its small state holds what JSON has no word for."""

    def extra_state(self) -> dict[str, Any]:
        state = super().extra_state()
        begun = self._optimizer is not None and self._optimizer.schedule.steps_done == 1
        return {**state, "betas": (0.9, 0.999)} if begun else state


class LosesGradientsOnTheWay(ReferenceEngine):
    """Declares that it moves its parts, and drops gradients instead."""

    def move(self, device: str, parts: frozenset[Part]) -> None:
        super().move(device, parts - {"grads"})
        if "grads" in parts:
            self.zero_grad()
