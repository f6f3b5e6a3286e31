"""A sound engine of several processes, as small as one can be: every rank holds, and runs, the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from engines.batch import Batch, TokenOutputs
from engines.contract import EngineContext, Part, Ranks, Shard, StepResult
from engines.testing.reference.engine import ReferenceEngine


class ShardedReference(ReferenceEngine):
    """Replicas see their own samples; the ranks of a replica, in context parallelism, answer for their own tokens."""

    def __init__(self, ctx: EngineContext) -> None:
        super().__init__(ctx)
        self._groups: list[ProcessGroup] = []
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            return
        cp = self._context_parallel_size()
        mine, place = divmod(dist.get_rank(), cp)
        starts = range(0, world, cp)
        self.ranks = Ranks(
            dp_rank=mine,
            dp_size=world // cp,
            dp_group=self._group([[start + other for start in starts] for other in range(cp)]),
            replica_group=self._group([list(range(start, start + cp)) for start in starts]) if cp > 1 else None,
            output_rank=mine * cp,
            is_output=self._is_output(place),
        )

    def _context_parallel_size(self) -> int:
        return self.ctx.config.context_parallel_size

    def _is_output(self, place: int) -> bool:
        return place == 0

    def _group(self, partition: list[list[int]]) -> ProcessGroup:
        """Mine of the groups into which all ranks fall."""
        mine, _ = dist.new_subgroups_by_enumeration(partition)
        self._groups.append(mine)
        return mine

    def forward_micro_batch(
        self, chunk: Module, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> TokenOutputs:
        outputs = super().forward_micro_batch(chunk, chunk_index, index, micro_batch, forward_only)
        group = self.ranks.replica_group
        return outputs if group is None else outputs.map(lambda one: Gather.apply(one, group, self._gradient_of))

    def _gradient_of(self, gradient: Tensor, mine: slice) -> Tensor:
        """What a rank passes on of the gradient of gathered outputs: that of its own tokens. The others' is theirs,
        and gradients are summed over ranks.
        """
        own = torch.zeros_like(gradient)
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
        said, group = super().describe(), self.ranks.replica_group
        said["layout"]["context_parallel_size"] = 1 if group is None else dist.get_world_size(group)
        return said

    def close(self) -> None:
        super().close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = []


class Gather(torch.autograd.Function):
    """Outputs `[tokens]`, of which each rank of a group has computed its own slice."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, group: ProcessGroup, gradient_of: Callable[..., Tensor]) -> Tensor:
        size = -(-len(outputs) // dist.get_world_size(group))
        start = dist.get_rank(group) * size
        ctx.mine, ctx.gradient_of = slice(start, start + size), gradient_of
        whole = torch.zeros_like(outputs)
        whole[ctx.mine] = outputs[ctx.mine]
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_of(gradient, ctx.mine), None, None
