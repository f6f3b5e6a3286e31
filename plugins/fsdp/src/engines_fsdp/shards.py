"""Which block of a tensor this rank holds: for checkpoints, for loading and for counting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from engines.contract import Shard, ShardReader
from engines.errors import CheckpointError
from engines.optimizer import Optimizer

NamedWeights = Iterable[tuple[str, Tensor]]


def local_shard(key: str, tensor: Tensor) -> Shard:
    """This rank's block of `tensor`, sharing its memory; empty where there are fewer rows than ranks."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Shard(key, shape, (0,) * len(shape), tensor, replica=rank)
    _, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Shard(key, shape, tuple(offset), tensor.to_local(), replica=_replica(tensor))


def _replica(tensor: DTensor) -> int:
    """Which copy of its block this rank holds: 0 on the first rank along every axis that replicates."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no shard"
    replica = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * tensor.device_mesh.size(axis) + coordinate[axis]
    return replica


def model_shards(weights: NamedWeights) -> Iterator[Shard]:
    """This rank's blocks of the weights, under `model.NAME`."""
    for name, weight in weights:
        yield local_shard(f"model.{name}", weight)


def optimizer_shards(optimizer: Optimizer) -> Iterator[Shard]:
    """This rank's blocks of AdamW's state, under `optimizer.MOMENT.NAME`, and `optimizer.step.NAME`.

    A parameter that has seen no update has no state, on any rank.
    """
    for name in optimizer.parameters:
        moments = optimizer.moments(name)
        if moments is None:
            continue
        for moment, value in moments.items():
            yield local_shard(f"optimizer.{moment}.{name}", value)
        yield local_shard(f"optimizer.step.{name}", torch.tensor(optimizer.updates(name)))


def load_model_shards(weights: NamedWeights, reader: ShardReader) -> None:
    """Fill the weights from a checkpoint. Raises `CheckpointError` where it holds another model's."""
    for name, weight in weights:
        _fill(local_shard(f"model.{name}", weight), reader)


def load_optimizer_shards(optimizer: Optimizer, reader: ShardReader) -> None:
    """Fill AdamW's state from a checkpoint; parameters without state there have none afterwards."""
    optimizer.forget()
    keys = reader.keys()
    for name in optimizer.parameters:
        step = f"optimizer.step.{name}"
        if step in keys:
            moments = optimizer.create_moments(name, int(reader.read(step, (), ())))
            for moment, value in moments.items():
                _fill(local_shard(f"optimizer.{moment}.{name}", value), reader)


def _fill(shard: Shard, reader: ShardReader) -> None:
    found = tuple(reader.shape(shard.key))
    if found != shard.global_shape:
        raise CheckpointError(
            f"{shard.key} has shape {found} in the checkpoint and {shard.global_shape} in this model",
            "load a checkpoint of the same model",
        )
    if shard.tensor.numel():
        reader.read_into(shard.key, shard.offset, shard.tensor)
