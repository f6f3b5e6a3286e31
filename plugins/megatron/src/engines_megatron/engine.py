"""Megatron-Core behind the engines contract."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
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
from engines.model_folder import read_config
from engines.models import Asked
from engines_megatron import groups
from engines_megatron.architectures import read_architecture
from engines_megatron.config import MegatronConfig
from engines_megatron.gradients import Gradients
from engines_megatron.layout import plan_layout
from engines_megatron.model.attention import PackedCoreAttention
from engines_megatron.model.build import build_chunks
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.model.transformer_config import transformer_config
from engines_megatron.optimizer import Optimizer
from engines_megatron.routing import Routing
from engines_megatron.rows import Rows, row_count
from engines_megatron.schedule import run_schedule
from engines_megatron.weights import (
    export_weights,
    load_model_shards,
    load_optimizer_shards,
    load_pretrained,
    model_shards,
    not_finite,
    optimizer_shards,
)


class MegatronEngine(BaseEngine):
    """Llama-like decoders and their mixtures of experts, on Megatron's modules, schedules and optimizers."""

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.config, MegatronConfig)
        self._config = ctx.config
        self._model_config = read_config(ctx.model.path)
        self._architecture = read_architecture(self._model_config)
        self._layout = plan_layout(ctx.config, self._architecture, groups.world_size())
        self._chunks: list[GPTChunk] = []
        self._gradients: Gradients | None = None
        self._optimizer: Optimizer | None = None
        self._routing: Routing
        self._rows: list[Rows] = []
        self._asked = Asked()
        self.ranks = groups.acquire(self._layout)
        self._holds_groups = True

    @property
    def lr(self) -> float:  # type: ignore[override]  # it is the schedule's to change
        return self._built_optimizer.schedule.lr

    def initialize(self) -> None:
        config = self._transformer_config()
        chunks = build_chunks(
            self._architecture,
            self._layout,
            config,
            model_type=self.ctx.model_type,
            model_config=self._model_config,
            core_attention=self._core_attention,
            device=self.ctx.device,
        )
        load_pretrained(chunks, self._architecture, self.ctx.model.path, self.ctx.model_type)
        self._chunks = chunks
        self._routing = Routing(chunks, self._architecture, self._layout, self._config.moe_aux_loss_coefficient)
        if self.ctx.optimizer is not None:
            self._gradients = Gradients(chunks, config, distributed_optimizer=self._config.distributed_optimizer)
            self._optimizer = Optimizer(
                self._gradients.modules,
                self.ctx.optimizer,
                self.ctx.total_steps,
                distributed=self._config.distributed_optimizer,
                dtype=self._dtype,
            )

    def set_mode(self, mode: Mode) -> None:
        for chunk in self._built_chunks:
            chunk.train(mode == "train")

    def micro_batch_rules(self, forward_only: bool) -> MicroBatchRules:
        layout = self._layout
        return MicroBatchRules(
            multiple_of=layout.pipeline if layout.virtual_pipeline > 1 else 1,
            rows=lambda lengths: row_count(lengths, layout.context, self._row_multiple),
        )

    def zero_grad(self) -> None:
        if self._gradients is not None:
            self._gradients.zero()
            self._built_optimizer.zero_grad()

    def forward_backward_batch(
        self,
        micro_batches: Sequence[Batch],
        loss: BoundLoss | None,
        needs: frozenset[str],
        forward_only: bool,
    ) -> list[MicroResult] | None:
        self._asked = Asked.of(loss, needs)
        micro_batches = [micro_batch.to(self.ctx.device) for micro_batch in micro_batches]
        self._rows = [self._rows_of(micro_batch) for micro_batch in micro_batches]
        accumulating = nullcontext() if forward_only else self._built_gradients.accumulating()
        try:
            self._routing.begin(micro_batches, forward_only=forward_only)
            with accumulating:
                results = run_schedule(
                    self._gradients.modules if self._gradients is not None else self._built_chunks,
                    partial(self._forward, micro_batches, forward_only),
                    micro_batches,
                    self._rows,
                    loss,
                    needs,
                    layout=self._layout,
                    forward_only=forward_only,
                )
            return self._routing.finish(results if self._is_last_stage else None)
        finally:
            self._rows = []
            self._routing.end()

    def _forward(
        self, micro_batches: Sequence[Batch], forward_only: bool, chunk_index: int, index: int
    ) -> tuple[Tensor, TokenOutputs | None]:
        hidden, outputs = self.ctx.hook.forward_micro_batch(
            chunk=self._chunks[chunk_index],
            chunk_index=chunk_index,
            index=index,
            micro_batch=micro_batches[index],
            forward_only=forward_only,
        )
        return hidden, outputs

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> tuple[Tensor, TokenOutputs | None]:
        assert isinstance(chunk, GPTChunk)
        rows = self._rows[index]
        with self._routing.recording(chunk, index):
            hidden = chunk(rows)
        return hidden, chunk.outputs(hidden, rows, *self._asked) if chunk.post_process else None

    def step(self) -> StepResult:
        result = self._built_optimizer.step()
        if result.skipped == "non_finite":
            return replace(result, not_finite=not_finite(self._built_chunks, self._architecture))
        return result

    def schedule_step(self) -> float:
        return self._built_optimizer.schedule.step()

    def iter_weights(self, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self._built_chunks, self._architecture, plan.dtype or self._dtype)

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        if "model" in parts:
            yield from model_shards(self._built_chunks, self._architecture, self._optimizer)
        if "optimizer" in parts:
            yield from optimizer_shards(self._built_chunks, self._architecture, self._built_optimizer)

    def load_shards(self, reader: ShardReader, parts: frozenset[Part]) -> None:
        if "model" in parts:
            load_model_shards(self._built_chunks, self._architecture, self._optimizer, reader)
        if "optimizer" in parts:
            load_optimizer_shards(self._built_chunks, self._architecture, self._built_optimizer, reader)

    def extra_state(self) -> dict[str, Any]:
        return {"schedule": self._optimizer.schedule.state()} if self._optimizer is not None else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self._optimizer is not None:
            self._optimizer.schedule.load_state(state["schedule"])

    def describe(self) -> dict[str, Any]:
        layout = groups.live_sizes()
        layout["virtual_pipeline_parallel_size"] = len(self._built_chunks)
        held = sum(parameter.numel() for chunk in self._built_chunks for parameter in chunk.parameters())
        return {"layout": layout, "parameters": held}

    def close(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._chunks, self._rows = [], []
        self._gradients = self._optimizer = self._routing = None
        if self._holds_groups:
            self._holds_groups = False
            groups.release()
        gc.collect()  # modules, hooks and buffers refer to each other
        DeviceServices(self.ctx.device).free_cached_memory()

    def _transformer_config(self) -> TransformerConfig:
        """What Megatron's modules are built from."""
        return transformer_config(
            self._architecture, self._layout, self._config, dtype=self._dtype, on_cpu=self.ctx.device.type == "cpu"
        )

    @property
    def _core_attention(self) -> type[Module] | None:
        """What attends in plain layers; None for Megatron's own, on devices where that takes packed rows."""
        return PackedCoreAttention

    def _rows_of(self, micro_batch: Batch) -> Rows:
        context = parallel_state.get_context_parallel_group() if self._layout.context > 1 else None
        return Rows.of(micro_batch, context=context, tensor=self._row_multiple)

    @property
    def _row_multiple(self) -> int:
        return self._layout.tensor if self._layout.sequence_parallel else 1

    @property
    def _is_last_stage(self) -> bool:
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def _dtype(self) -> torch.dtype:
        """What the model computes in and is exported as."""
        dtype: torch.dtype = getattr(torch, self.ctx.model.dtype)
        return dtype

    @property
    def _built_chunks(self) -> list[GPTChunk]:
        assert self._chunks, "called before initialize, or after close"
        return self._chunks

    @property
    def _built_gradients(self) -> Gradients:
        assert self._gradients is not None, "core trains only engines that were given optimizer settings"
        return self._gradients

    @property
    def _built_optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "core steps only engines that were given optimizer settings"
        return self._optimizer
