"""The device mesh: replicas of a sharded model, every rank of which sees its own samples."""

from __future__ import annotations

from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engines.contract import Ranks

_numbers = count()


def build_mesh(device: torch.device, replicate_size: int) -> DeviceMesh | None:
    """A mesh over all ranks: (shard,), or (replicate, shard) for several replicas; None without process group.

    All ranks call it. `FSDP2Config.check` has seen to it that the replicas divide the ranks.
    """
    if not dist.is_initialized():
        return None
    world_size = dist.get_world_size()
    # DTensor caches layouts by meshes that compare equal, names included; a mesh made anew for each engine must
    # not equal that of another, or tensors of one engine would run on the groups that the other destroyed.
    number = next(_numbers)
    if replicate_size == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=(f"shard_{number}",))
    return init_device_mesh(
        device.type,
        (replicate_size, world_size // replicate_size),
        mesh_dim_names=(f"replicate_{number}", f"shard_{number}"),
    )


def data_parallel_ranks(mesh: DeviceMesh | None) -> Ranks:
    """Every rank is a data-parallel one, and the output rank of a replica of its own."""
    rank = dist.get_rank() if mesh is not None else 0
    size = mesh.size() if mesh is not None else 1
    return Ranks(
        dp_rank=rank,
        dp_size=size,
        dp_group=dist.group.WORLD if size > 1 else None,
        replica_group=None,
        output_rank=rank,
        is_output=True,
    )


def replicas(mesh: DeviceMesh | None) -> int:
    """How many replicas of the sharded model the mesh holds."""
    return mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1


def destroy_groups(mesh: DeviceMesh) -> None:
    """Destroy the process groups that the mesh made; the default group belongs to whoever made that."""
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
