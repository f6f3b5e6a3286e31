"""What the routers of all stages say about a pass: metrics, and the load-balancing loss's place in the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from engines.batch import Batch
from engines.contract import MicroResult
from engines_megatron.architectures import Architecture
from engines_megatron.layout import Layout
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.model.router import auxiliary_scale


class Routing:
    """Around each pass of one engine's chunks; does nothing for a model without experts.

    Metrics of a micro-batch, over all its layers: `moe/load_balancing_loss` and `moe/z_loss` (sums over layers,
    without coefficients), `moe/tokens_per_expert/E` (rows that went to expert E), and `moe/busiest_expert` (rows of
    the busiest expert of a layer over the mean of that layer, at its worst).
    """

    def __init__(
        self, chunks: Sequence[GPTChunk], architecture: Architecture, layout: Layout, coefficient: float
    ) -> None:
        """`coefficient`: of the load-balancing loss; 0 leaves it a metric."""
        self._experts = architecture.experts.number if architecture.experts is not None else 0
        self._layers = architecture.num_layers
        self._chunks = chunks
        self._routers = {id(chunk): chunk.routers() for chunk in chunks}
        self._layout = layout
        self._coefficient = coefficient
        self._fillers: list[bool] = []
        self._table = torch.empty(0)

    def begin(self, micro_batches: Sequence[Batch], *, forward_only: bool) -> None:
        """Before a pass. All ranks call it."""
        if not self._experts:
            return
        self._fillers = [micro_batch.is_filler for micro_batch in micro_batches]
        shape = (len(micro_batches), self._layers, self._experts + 2)
        self._table = torch.zeros(shape, device=micro_batches[0]["input_ids"].device)
        if not forward_only and self._coefficient:
            scale = auxiliary_scale(self._coefficient, self._count_real(), self._layout.data, self._layout.context)
            self._set_scale(scale)

    @contextmanager
    def recording(self, chunk: GPTChunk, index: int) -> Iterator[None]:
        """Around the forward of micro-batch `index` through `chunk`; not around its backward pass."""
        routers = self._routers[id(chunk)] if self._experts and not self._fillers[index] else []
        for router in routers:
            router.recording = True
        try:
            yield
            for router in routers:
                record = router.take()
                losses = torch.stack([record.load_balancing_loss, record.z_loss])
                self._table[index, router.layer_number - 1] = torch.cat([losses, record.tokens_per_expert])
        finally:
            for router in routers:
                router.recording = False
            chunk.forget_routes()

    def finish(self, results: list[MicroResult] | None) -> list[MicroResult] | None:
        """After a pass: `results` with the metrics of all stages' layers. All ranks call it, with what they have."""
        if not self._experts:
            return results
        if self._layout.pipeline > 1:
            dist.all_reduce(self._table, group=parallel_state.get_pipeline_model_parallel_group())
        if results is None:
            return None
        pairs = zip(results, self._fillers, self._table.cpu(), strict=True)
        return [result if filler else replace(result, metrics=_metrics(table)) for result, filler, table in pairs]

    def end(self) -> None:
        """After a pass, also one that failed."""
        if self._experts:
            self._set_scale(None)
            self._table = torch.empty(0)
            for chunk in self._chunks:  # a recomputed forward routes outside of `recording`
                chunk.forget_routes()

    def _set_scale(self, scale: float | None) -> None:
        for routers in self._routers.values():
            for router in routers:
                router.auxiliary_scale = scale

    def _count_real(self) -> int:
        """Micro-batches of the step over all replicas, without fillers."""
        count = torch.tensor(self._fillers.count(False), device=self._table.device)
        if self._layout.data > 1:
            dist.all_reduce(count, group=parallel_state.get_data_parallel_group(with_context_parallel=False))
        return int(count)


def _metrics(table: Tensor) -> dict[str, Tensor]:
    """From one micro-batch's rows, one a layer; dense layers' are zero."""
    losses, counts = table[:, :2].sum(0), table[:, 2:]
    mixtures = counts[counts.sum(1) > 0]
    busiest = (mixtures.amax(1) / mixtures.mean(1)).max()
    per_expert = {f"moe/tokens_per_expert/{expert}": total for expert, total in enumerate(counts.sum(0))}
    return {
        "moe/load_balancing_loss": losses[0],
        "moe/z_loss": losses[1],
        "moe/busiest_expert": busiest,
        **per_expert,
    }
