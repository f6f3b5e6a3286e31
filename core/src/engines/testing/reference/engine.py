"""Plain transformers in one process, behind the engines contract."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.config import PARALLEL_SIZES
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
from engines.models import named_weights
from engines.optimizer import Optimizer
from engines.testing.reference.model import export_weights, load_model, token_outputs


class ReferenceEngine(BaseEngine):
    """Any causal language model that transformers builds, and its value model, in float32; nothing is sharded."""

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        # One process is its own replica, sees all samples, and holds the outputs.
        self.ranks = Ranks(dp_rank=0, dp_size=1, dp_group=None, replica_group=None, output_rank=0, is_output=True)
        self._model: Any = None
        self._optimizer: Optimizer | None = None
        self._asked: frozenset[str] = frozenset()

    @property
    def lr(self) -> float:  # type: ignore[override]  # it is the schedule's to change
        return self._built_optimizer.schedule.lr

    def initialize(self) -> None:
        self._model = load_model(self.ctx.model.path, self.ctx.model_type).to(self.ctx.device)
        if self.ctx.optimizer is not None:
            parameters = dict(self._model.named_parameters())
            self._optimizer = Optimizer(parameters, self.ctx.optimizer, self.ctx.total_steps)

    def set_mode(self, mode: Mode) -> None:
        self._model.train(mode == "train")

    def move(self, device: str, parts: frozenset[Part]) -> None:
        target = torch.device("cpu") if device == "cpu" else self.ctx.device
        for tensor in self._held(parts):
            tensor.data = tensor.data.to(target)

    def micro_batch_rules(self, forward_only: bool) -> MicroBatchRules:
        return MicroBatchRules()

    def zero_grad(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def forward_backward_batch(
        self,
        micro_batches: Sequence[Batch],
        loss: BoundLoss | None,
        needs: frozenset[str],
        forward_only: bool,
    ) -> list[MicroResult]:
        self._asked = needs if loss is None else needs | loss.needs
        with torch.set_grad_enabled(not forward_only):
            return [
                self._run(index, micro_batch.to(self.ctx.device), loss, needs, forward_only)
                for index, micro_batch in enumerate(micro_batches)
            ]

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        # Through the hook, not by calling the method: around it stand the wrappers that others have put on.
        outputs: TokenOutputs = self.ctx.hook.forward_micro_batch(
            chunk=self._model, chunk_index=0, index=index, micro_batch=micro_batch, forward_only=forward_only
        )
        if loss is None:
            return MicroResult({}, outputs.keep(needs) if needs else None)
        # Its denominators are those of the whole step, so gradients add up over micro-batches as they are. A filler's
        # zero is differentiated like any other: on several ranks, backward passes must meet.
        scaled, result = loss(outputs, micro_batch)
        if not forward_only:
            scaled.backward()
        return result

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        return token_outputs(chunk, micro_batch, self._asked)

    def step(self) -> StepResult:
        return self._built_optimizer.step()

    def schedule_step(self) -> float:
        return self._built_optimizer.schedule.step()

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self._model, plan.dtype or torch.float32)

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        if "model" in parts:
            for name, weight in named_weights(self._model):
                yield _whole(f"model.{name}", weight)
        if "optimizer" in parts:
            optimizer = self._built_optimizer
            for name in optimizer.parameters:
                # None before the first update, and for a parameter that never had a gradient.
                for moment, value in (optimizer.moments(name) or {}).items():
                    yield _whole(f"optimizer.{moment}.{name}", value)
                yield _whole(f"optimizer.step.{name}", torch.tensor(optimizer.updates(name)))

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        if "model" in parts:
            for name, weight in named_weights(self._model):
                _fill(f"model.{name}", weight, reader)
        if "optimizer" in parts:
            optimizer = self._built_optimizer
            optimizer.forget()
            for name in optimizer.parameters:
                updates = int(reader.read(f"optimizer.step.{name}", (), ()))
                if updates:
                    for moment, value in optimizer.create_moments(name, updates).items():
                        _fill(f"optimizer.{moment}.{name}", value, reader)

    def extra_state(self) -> dict[str, Any]:
        return {"schedule": self._optimizer.schedule.state()} if self._optimizer is not None else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self._optimizer is not None:
            self._optimizer.schedule.load_state(state["schedule"])

    def describe(self) -> dict[str, Any]:
        layout = {**dict.fromkeys(PARALLEL_SIZES, 1), "data_parallel_size": self.ranks.dp_size}
        return {"layout": layout, "parameters": sum(weight.numel() for weight in self._model.parameters())}

    def close(self) -> None:
        self._model = self._optimizer = None
        gc.collect()  # modules refer to each other

    def _held(self, parts: frozenset[Part]) -> Iterator[Tensor]:
        """The tensors of the named parts."""
        if "model" in parts:
            yield from self._model.parameters()
            yield from self._model.buffers()
        if "grads" in parts:
            yield from (weight.grad for weight in self._model.parameters() if weight.grad is not None)
        if "optimizer" in parts and self._optimizer is not None:
            for name in self._optimizer.parameters:
                yield from (self._optimizer.moments(name) or {}).values()

    @property
    def _built_optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "core steps only engines that were given optimizer settings"
        return self._optimizer


def _whole(key: str, tensor: Tensor) -> Shard:
    """All of a tensor, which no other rank holds."""
    return Shard(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


@torch.no_grad()
def _fill(key: str, tensor: Tensor, reader: ShardReader) -> None:
    reader.read_into(key, (0,) * tensor.dim(), tensor)
