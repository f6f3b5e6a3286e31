"""A sound engine of several processes, as small as one can be, and engines that are wrong where several meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import EngineContext, Part, Ranks, Shard, StepResult
from engines.testing.reference.engine import ReferenceEngine


class ShardedReference(ReferenceEngine):
    """Every rank holds the whole model. Replicas see their own samples; the ranks of a replica (context parallelism)
    answer for their own part of the tokens.
    """

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        self._groups: list[Any] = []
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        rank, world, cp = dist.get_rank(), dist.get_world_size(), self._context_parallel_size
        replicas = [list(range(first, first + cp)) for first in range(0, world, cp)]
        peers = [list(range(place, world, cp)) for place in range(cp)]
        replica, same_place = (self._group(all_of_them) for all_of_them in (replicas, peers))
        self.ranks = Ranks(
            dp_rank=rank // cp,
            dp_size=world // cp,
            dp_group=same_place,
            replica_group=replica if cp > 1 else None,
            output_rank=rank // cp * cp,
            is_output=self._is_output(rank % cp),
        )

    @property
    def _context_parallel_size(self) -> int:
        return self.ctx.config.context_parallel_size

    def _is_output(self, place: int) -> bool:
        return place == 0

    def _group(self, partition: list[list[int]]) -> Any:
        mine, every = dist.new_subgroups_by_enumeration(partition)
        self._groups += [group for group in every if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER]
        return mine

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        given = {name: getattr(outputs, name) for name in ("log_probs", "entropy")}
        return replace(outputs, **{name: self._gather(value) for name, value in given.items() if value is not None})

    def _gather(self, outputs: Tensor) -> Tensor:
        group = self.ranks.replica_group
        return outputs if group is None else _OwnSlices.apply(outputs, group, self._own_gradient)

    def _own_gradient(self, gradient: Tensor) -> Tensor:
        """What the backward of the gather makes of a gradient: this rank's own slice."""
        own = torch.zeros_like(gradient)
        mine = _slice(len(gradient), self.ranks.replica_group)
        own[mine] = gradient[mine]
        return own

    def step(self) -> StepResult:
        if self.ranks.dp_group is not None:
            for parameter in self._model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        return super().step()

    def shards(self, parts: frozenset[Part]) -> Iterator[Shard]:
        replica = dist.get_rank() if dist.is_initialized() else 0
        return (replace(shard, replica=replica) for shard in super().shards(parts))

    def describe(self) -> dict[str, Any]:
        said = super().describe()
        group = self.ranks.replica_group
        size = 1 if group is None else dist.get_world_size(group)
        return {**said, "layout": {**said["layout"], "context_parallel_size": size}}

    def close(self) -> None:
        super().close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = []


class _OwnSlices(torch.autograd.Function):
    """Every rank's slice of the outputs, put together."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, group: Any, own_gradient: Any) -> Tensor:
        ctx.own_gradient = own_gradient
        own = torch.zeros_like(outputs)
        mine = _slice(len(outputs), group)
        own[mine] = outputs[mine]
        dist.all_reduce(own, group=group)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.own_gradient(gradient), None, None


def _slice(length: int, group: Any) -> slice:
    place, size = dist.get_rank(group), dist.get_world_size(group)
    step = -(-length // size)
    return slice(place * step, (place + 1) * step)


class DoublesGradients(ShardedReference):
    """The gather's backward gives every rank the gradient of all tokens, so that replicas of two count twice."""

    def _own_gradient(self, gradient: Tensor) -> Tensor:
        return gradient


class TwoOutputRanks(ShardedReference):
    """Every rank of a replica calls itself its output rank."""

    def _is_output(self, place: int) -> bool:
        return True


class IgnoresLayout(ShardedReference):
    """Builds data parallelism where context parallelism is asked for."""

    @property
    def _context_parallel_size(self) -> int:
        return 1


class AveragesGradients(ShardedReference):
    """Gradients are the mean over ranks."""

    def step(self) -> StepResult:
        for parameter in self._model.parameters():
            if parameter.grad is not None and self.ranks.dp_size > 1:
                parameter.grad.div_(self.ranks.dp_size)
        return super().step()


class SkipsAlone(ShardedReference):
    """A rank whose own gradients aren't finite takes none, so that the others step."""

    def step(self) -> StepResult:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().step()


class LeavesGroups(ShardedReference):
    """Its process groups outlive it."""

    def close(self) -> None:
        self._groups = []
        super().close()
