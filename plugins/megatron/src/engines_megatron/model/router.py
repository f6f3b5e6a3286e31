"""The router of mixture-of-experts layers: Megatron's top-k routing with core's auxiliary losses.

Megatron's own losses keep their scale and their records in process-wide variables, which engines in one process
would share; here both belong to the router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engines.models.auxiliary import RoutingSums


@dataclass(frozen=True)
class RoutingRecord:
    """How one layer routed one micro-batch, all its context- and sequence-parallel shards together; detached."""

    load_balancing_loss: Tensor
    """0-d float32, without coefficient."""
    z_loss: Tensor
    """0-d float32; a metric alone."""
    tokens_per_expert: Tensor
    """float32 `[experts]`, padding left out."""


def auxiliary_scale(coefficient: float, micro_batches: int, data: int, context: int) -> float | None:
    """What to multiply the load-balancing loss of each layer and micro-batch by; None where it isn't wanted.

    `micro_batches`: real ones, without fillers, of the step over all `data` replicas. The loss of a step is the
    mean over those, summed over layers, times `coefficient`. It enters the backward pass inside the layer, behind
    the point where the schedule scales the main loss, so it needs by itself the factor that both carry from there
    on: data-parallel reduction averages over data times context ranks what must become a sum. Shards of sequence
    parallelism are summed as they are, and so are a router's own gradients over them.
    """
    if coefficient == 0 or micro_batches == 0:
        return None
    return coefficient * data * context / micro_batches


class Router(TopKRouter):  # type: ignore[misc]
    """Top-k routing that can record itself and pull towards an even load.

    Built by Megatron from the spec, on every rank. With `recording` or `auxiliary_scale` set, the ranks that hold
    shards of a micro-batch meet in one small all-reduce per forward, so they must set both alike.
    """

    recording: bool = False
    """Whether to keep a record of each forward, for `take`. On around a forward pass, off around backward passes:
    recomputed layers record nothing. Never on for fillers, which have no statistics."""
    auxiliary_scale: float | None = None
    """Factor of the load-balancing loss, see the function of that name; None keeps it out of the gradient. Set for
    the whole step, since a recomputed layer is differentiated in the backward pass."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        assert self.routing_type == "none" and config.moe_z_loss_coeff is None
        assert self.score_function == "softmax" and config.moe_expert_capacity_factor is None
        self._record: RoutingRecord | None = None

    def take(self) -> RoutingRecord:
        """The record of the forward before, given away."""
        record, self._record = self._record, None
        assert record is not None, "the router recorded nothing"
        return record

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `TopKRouter.routing`; `logits` `[rows, 1, experts]`, `padding_mask` `[rows, 1]`, True on padding."""
        probs, chosen = super().routing(logits, padding_mask)
        pulls = self.auxiliary_scale is not None and torch.is_grad_enabled()
        if not (pulls or self.recording):
            return probs, chosen
        real = None if padding_mask is None else ~padding_mask.reshape(-1)
        own = RoutingSums.of(logits.view(-1, logits.shape[-1]), chosen, real)
        every = self._over_shards(own)
        if self.recording:
            self._record = RoutingRecord(every.load_balancing_loss, every.z_loss, every.counts)
        if pulls:
            loss = replace(every, probabilities=own.probabilities).load_balancing_loss
            probs = _Attach.apply(probs, loss, self.auxiliary_scale)  # type: ignore[no-untyped-call]
        return probs, chosen

    def _over_shards(self, own: RoutingSums) -> RoutingSums:
        """The sums over all rows of the micro-batch, detached."""
        flat = own.flat()
        group = self.tp_cp_group if self.config.sequence_parallel else self.cp_group
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
        return RoutingSums.unflat(flat)


class _Attach(torch.autograd.Function):
    """`probs` unchanged; their backward pass also starts one of `scale * loss`."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dtype, device = ctx.like
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None
