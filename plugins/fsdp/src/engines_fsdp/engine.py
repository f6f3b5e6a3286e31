"""FSDP2 behind the engines contract."""

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
    Shard,
    ShardReader,
    StepResult,
)
from engines.device_services import DeviceServices
from engines.models import Asked, PackedCausalLM, build_causal_lm
from engines.optimizer import Optimizer
from engines_fsdp.config import FSDP2Config
from engines_fsdp.export import export_weights
from engines_fsdp.loading import load_pretrained
from engines_fsdp.mesh import build_mesh, data_parallel_ranks, destroy_groups, replicas
from engines_fsdp.sharding import abandon, reshard, set_reduction, shard_model
from engines_fsdp.shards import (
    load_model_shards,
    load_optimizer_shards,
    local_shard,
    model_shards,
    optimizer_shards,
)


class FSDP2Engine(BaseEngine):
    """Any causal LM that transformers builds, sharded with `fully_shard`; every rank sees its own samples.

    Parameters, gradients and optimizer state are float32 shards, whatever precision the model computes in.
    """

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.config, FSDP2Config)
        self._config = ctx.config
        self._mesh = build_mesh(ctx.device, ctx.config.data_parallel_replicate_size)
        self._model: PackedCausalLM | None = None
        self._optimizer: Optimizer | None = None
        self._asked = Asked()
        self.ranks = data_parallel_ranks(self._mesh)

    @property
    def lr(self) -> float:  # type: ignore[override]  # it is the schedule's to change
        return self._built_optimizer.schedule.lr

    def initialize(self) -> None:
        model = build_causal_lm(self.ctx.model.path)
        if self._config.activation_checkpointing:
            model.enable_activation_checkpointing()
        shard_model(model, self._mesh, dtype=self._dtype, reshard_after_forward=self._config.reshard_after_forward)
        model.materialize(self.ctx.device)
        load_pretrained(model, self.ctx.model.path)
        self._model = model
        if self.ctx.optimizer is not None:
            parameters = dict(model.model.named_parameters())
            self._optimizer = Optimizer(parameters, self.ctx.optimizer, self.ctx.total_steps)

    def set_mode(self, mode: Mode) -> None:
        self._built_model.train(mode == "train")

    def micro_batch_rules(self, forward_only: bool) -> MicroBatchRules:
        return MicroBatchRules()

    def zero_grad(self) -> None:
        self._built_model.zero_grad(set_to_none=True)

    def forward_backward_batch(
        self,
        micro_batches: Sequence[Batch],
        loss: BoundLoss | None,
        needs: frozenset[str],
        forward_only: bool,
    ) -> list[MicroResult]:
        model = self._built_model
        self._asked = Asked.of(loss, needs)
        every = self._config.accumulate_gradients == "sharded"
        results = []
        try:
            with torch.set_grad_enabled(not forward_only):
                for index, micro_batch in enumerate(micro_batches):
                    set_reduction(model, last=index == len(micro_batches) - 1, every=every)
                    results.append(self._run(index, micro_batch, loss, needs, forward_only))
        except BaseException:
            abandon(model)
            raise
        if forward_only:
            reshard(model)
        return results

    def _run(
        self, index: int, micro_batch: Batch, loss: BoundLoss | None, needs: frozenset[str], forward_only: bool
    ) -> MicroResult:
        micro_batch = micro_batch.to(self.ctx.device)
        outputs: TokenOutputs = self.ctx.hook.forward_micro_batch(
            chunk=self._model, chunk_index=0, index=index, micro_batch=micro_batch, forward_only=forward_only
        )
        if loss is None:
            return MicroResult({}, outputs.keep(needs) if needs else None)
        scaled, record = loss(outputs, micro_batch)
        if not forward_only:
            scaled.backward()
        return record

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs: TokenOutputs = chunk(micro_batch, *self._asked)
        return outputs

    def step(self) -> StepResult:
        return self._built_optimizer.step()

    def schedule_step(self) -> float:
        return self._built_optimizer.schedule.step()

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self._built_model, plan.dtype or self._dtype)

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        if "model" in parts:
            yield from model_shards(self._built_model.named_weights())
        if "optimizer" in parts:
            yield from optimizer_shards(self._built_optimizer)

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        if "model" in parts:
            load_model_shards(self._built_model.named_weights(), reader)
        if "optimizer" in parts:
            load_optimizer_shards(self._built_optimizer, reader)

    def extra_state(self) -> dict[str, Any]:
        return {"schedule": self._optimizer.schedule.state()} if self._optimizer is not None else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self._optimizer is not None:
            self._optimizer.schedule.load_state(state["schedule"])

    def describe(self) -> dict[str, Any]:
        layout = dict.fromkeys(PARALLEL_SIZES, 1)
        layout["data_parallel_size"] = self.ranks.dp_size
        layout["data_parallel_replicate_size"] = replicas(self._mesh)
        held = [
            local_shard(name, weight).tensor.numel() for name, weight in self._built_model.model.named_parameters()
        ]
        return {"layout": layout, "parameters": sum(held)}

    def close(self) -> None:
        self._model = self._optimizer = None
        if self._mesh is not None:
            destroy_groups(self._mesh)
            self._mesh = None
        gc.collect()  # FSDP's states and modules refer to each other
        DeviceServices(self.ctx.device).free_cached_memory()

    @property
    def _dtype(self) -> torch.dtype:
        """What the model computes in and is exported as."""
        dtype: torch.dtype = getattr(torch, self.ctx.model.dtype)
        return dtype

    @property
    def _built_model(self) -> PackedCausalLM:
        assert self._model is not None, "called before initialize, or after close"
        return self._model

    @property
    def _built_optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "core steps only engines that were given optimizer settings"
        return self._optimizer
