"""The gradient norm over all ranks, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

BLOCK = 1024
"""Elements whose squares are summed in the gradients' own precision."""


def gradient_norm(parameters: Iterable[Parameter]) -> float:
    """The L2 norm over all gradients, each element once, equal on all ranks; a missing gradient counts as 0.

    Gradients may be plain tensors (held alike by every rank) and DTensors of any meshes: squares are summed
    over the mesh axes that shard a tensor, never over those that replicate it. Exact to about 1e-7, so
    that the order of parameters and shards does not show. Every rank of the gradients' meshes must call it.
    """
    shards: dict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    device = torch.device("cpu")
    for parameter in parameters:
        if parameter.grad is not None:
            shards[_sharding_groups(parameter.grad)].append(local(parameter.grad))
            device = parameter.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, gradients in shards.items():
        squares = sum_of_squares(gradients)
        for group in groups:
            squares = sum_over_ranks(squares, group)
        total += squares
    return float(total.sqrt())


def sum_over_ranks(value: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of a 0-d `value` over the ranks of `group`, the same bits on each; all of them call it.

    Gathered and then added, not all-reduced: Ascend's HCCL moves float64, but does not reduce it.
    """
    values = value.new_empty(dist.get_world_size(group))
    dist.all_gather_single(values, value[None], group=group)
    return values.sum()


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Over plain tensors of this rank, at least one; float64, 0-d, on their device.

    Blocks are summed in the gradients' precision, their sums in float64.

    A single float32 sum over a matrix is off by 1e-5; converting everything to float64 takes 15 times as long.
    """
    norms = [
        torch.linalg.vector_norm(block, dim=1, dtype=torch.promote_types(block.dtype, torch.float32)).double()
        for gradient in gradients
        for block in _blocks(gradient.reshape(-1))
    ]
    return torch.cat(norms).square().sum()


def _blocks(flat: Tensor) -> tuple[Tensor, Tensor]:
    whole = flat.numel() // BLOCK * BLOCK
    return flat[:whole].view(-1, BLOCK), flat[whole:][None]


def clip_gradients(parameters: Iterable[Parameter], norm: float, clip_grad: float | None) -> None:
    """Multiply all gradients in place by min(1, clip_grad / (norm + 1e-6)); None leaves them."""
    if clip_grad is None:
        return
    factor = min(1.0, clip_grad / (norm + 1e-6))
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def not_finite(parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
    """Names of those whose gradient, as far as this rank holds it, has an infinite element or NaN."""
    return tuple(
        name
        for name, parameter in parameters.items()
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding_groups(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups over which this gradient's shards add up to the whole."""
    if not isinstance(gradient, DTensor):
        return ()
    assert not any(place.is_partial() for place in gradient.placements), "a gradient still to be reduced"
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(axis) for axis, place in enumerate(gradient.placements) if place.is_shard())
