"""The same norm and the same steps, whatever shards the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from engines.config import OptimizerConfig
from engines.optimizer import Optimizer

SHAPES = [(64, 33), (3, 5), (7,), (1, 4), (8, 6)]
STEPS = 3


def random_tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(make: Any) -> tuple[list[float], list[Tensor]]:
    """Norms and weights of some steps; `make(index, tensor)` lays a tensor out."""
    named = {str(i): Parameter(make(i, value)) for i, value in enumerate(random_tensors(0))}
    optimizer = Optimizer(named, OptimizerConfig(lr=1e-2, eps=1e-4, weight_decay=0.1), None)
    norms = []
    for step in range(1, STEPS + 1):
        for i, gradient in enumerate(random_tensors(step)):
            named[str(i)].grad = make(i, gradient)
        norms.append(optimizer.step().grad_norm)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in named.values()]
    return norms, [weight.detach() for weight in weights]


def train_sharded(mesh_shape: tuple[int, ...], layouts: list[tuple[Placement, ...]]) -> tuple[Any, Any]:
    """The last parameter stays a plain tensor, held alike by all ranks."""
    mesh = init_device_mesh("cpu", mesh_shape)

    def make(index: int, tensor: Tensor) -> Tensor:
        if index == len(SHAPES) - 1:
            return tensor.clone()
        return distribute_tensor(tensor, mesh, layouts[index % len(layouts)])

    return train(make)


def train_on_two_meshes() -> tuple[Any, Any]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    meshes = [both["a"], both["b"]]
    return train(lambda index, tensor: distribute_tensor(tensor, meshes[index % 2], [Shard(0)]))


LAYOUTS = {
    "rows over 4": ((4,), [(Shard(0),)]),
    "copies over 4": ((4,), [(Replicate(),)]),
    "2 replicas of 2 shards": ((2, 2), [(Replicate(), Shard(0))]),
    "a layout each": ((2, 2), [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Shard(0))]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_show(layout: str, world: Any) -> None:
    mesh_shape, placements = LAYOUTS[layout]
    check(world(4)(train_sharded, mesh_shape, placements))


def test_parameters_of_two_meshes(world: Any) -> None:
    check(world(4)(train_on_two_meshes))


def check(ranks: list[tuple[list[float], list[Tensor]]]) -> None:
    norms, weights = train(lambda index, tensor: tensor.clone())
    for found_norms, found in ranks:
        assert found_norms == ranks[0][0], "ranks disagree"
        assert found_norms == pytest.approx(norms, rel=1e-7)
        for ours, expected in zip(found, weights, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=2e-7)
