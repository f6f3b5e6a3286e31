"""Collectives of the simulated device: what gloo does with tensors of the CPU, and HCCL's refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

Results = list[Tensor]


def mine(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (torch.rand(shape, generator=generator) * 10).to(dtype).to(device)


def empty(device: str, *shape: int) -> Tensor:
    return torch.zeros(shape, device=device)


def all_reduce(device: str, op: Any = ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Results:
    x = mine(device, 3, 5, dtype=dtype)
    dist.all_reduce(x, op)
    return [x]


def all_reduce_a_view(device: str) -> Results:
    x = mine(device, 3, 8)
    dist.all_reduce(x[1])
    return [x]


def reduce(device: str) -> Results:
    x = mine(device, 5)
    dist.reduce(x, 1)
    return [x] if dist.get_rank() == 1 else []


def all_gather(device: str) -> Results:
    outputs = [empty(device, 5) for _ in range(2)]
    dist.all_gather(outputs, mine(device, 5))
    return outputs


def all_gather_single(device: str) -> Results:
    output = empty(device, 10)
    dist.all_gather_into_tensor(output, mine(device, 5))
    return [output]


def reduce_scatter(device: str) -> Results:
    output = empty(device, 5)
    dist.reduce_scatter(output, list(mine(device, 2, 5)))
    return [output]


def reduce_scatter_single(device: str) -> Results:
    output = empty(device, 5)
    dist.reduce_scatter_tensor(output, mine(device, 10), ReduceOp.MAX)
    return [output]


def broadcast(device: str) -> Results:
    x = mine(device, 5)
    dist.broadcast(x, 1)
    return [x]


def gather(device: str) -> Results:
    outputs = [empty(device, 5) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(mine(device, 5), outputs, 0)
    return outputs or []


def scatter(device: str) -> Results:
    output = empty(device, 5)
    dist.scatter(output, list(mine(device, 2, 5)) if dist.get_rank() == 0 else None, 0)
    return [output]


def all_to_all(device: str) -> Results:
    outputs = [empty(device, 3) for _ in range(2)]
    dist.all_to_all(outputs, list(mine(device, 2, 3)))
    return outputs


def all_to_all_single(device: str) -> Results:
    output = empty(device, 4, 3)
    dist.all_to_all_single(output, mine(device, 4, 3))
    return [output]


def all_to_all_with_splits(device: str) -> Results:
    rank = dist.get_rank()
    sizes = [[1, 2], [3, 4]]
    received = [sizes[source][rank] for source in range(2)]
    output = empty(device, sum(received), 3)
    dist.all_to_all_single(output, mine(device, sum(sizes[rank]), 3), received, sizes[rank])
    return [output]


def send(device: str) -> Results:
    x = mine(device, 5)
    if dist.get_rank() == 0:
        dist.send(x, 1, tag=3)
    else:
        dist.recv(x, 0, tag=3)
    return [x]


def exchange(device: str) -> Results:
    """Both ways at once: sends must not wait for their receivers."""
    other = 1 - dist.get_rank()
    outputs = [empty(device, 5), empty(device, 5)]
    sent = mine(device, 2, 5)
    operations = [dist.P2POp(dist.isend, sent[i], other) for i in range(2)]
    operations += [dist.P2POp(dist.irecv, outputs[i], other) for i in range(2)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return outputs


def overlapping(device: str) -> Results:
    tensors = [mine(device, 5) for _ in range(3)]
    works = [dist.all_reduce(x, ReduceOp.SUM, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    return tensors


def in_a_group(device: str) -> Results:
    group = dist.new_group([1])
    x = mine(device, 5)
    if dist.get_rank() == 1:
        dist.all_reduce(x, group=group)
        dist.barrier(group)
        dist.destroy_process_group(group)
    return [x]


def functional(device: str) -> Results:
    from torch.distributed import _functional_collectives as funcol

    gathered = funcol.all_gather_tensor(mine(device, 4), 0, dist.group.WORLD)
    return [gathered + 1, funcol.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) + 1]


COLLECTIVES: dict[str, Callable[[str], Results]] = {
    "all_reduce": all_reduce,
    "maximum": lambda device: all_reduce(device, ReduceOp.MAX),
    "minimum": lambda device: all_reduce(device, ReduceOp.MIN),
    "product": lambda device: all_reduce(device, ReduceOp.PRODUCT),
    "integers": lambda device: all_reduce(device, dtype=torch.int64),
    "bfloat16": lambda device: all_reduce(device, dtype=torch.bfloat16),
    "all_reduce_a_view": all_reduce_a_view,
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_to_all_with_splits": all_to_all_with_splits,
    "send": send,
    "exchange": exchange,
    "overlapping": overlapping,
    "in_a_group": in_a_group,
    "functional": functional,
}


def on_both_devices(name: str) -> int:
    run = COLLECTIVES[name]
    found, expected = run("npu"), run("cpu")
    for one, other in zip(found, expected, strict=True):
        assert one.device == torch.device("npu", dist.get_rank())
        assert torch.equal(one.cpu(), other)
    return len(found)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_equals_gloo(name: str, npu_world: Any) -> None:
    assert any(npu_world(2)(on_both_devices, name))


def average() -> None:
    x, half = mine("npu", 5), mine("npu", 5)
    dist.all_reduce(x)
    dist.all_reduce(half, ReduceOp.AVG)
    assert torch.equal(half, x / 2)
    shares = empty("npu", 2)
    dist.reduce_scatter_tensor(shares, torch.full((4,), 1.0 + dist.get_rank(), device="npu"), ReduceOp.AVG)
    assert shares.tolist() == [1.5, 1.5]


def test_average(npu_world: Any) -> None:
    npu_world(2)(average)


def exchange_uneven() -> None:
    rank = dist.get_rank()
    sizes = [[1, 2], [3, 4]]  # from rank to rank
    sent = [torch.full((1, size), 10.0 * rank + to, device="npu") for to, size in enumerate(sizes[rank])]
    outputs = [empty("npu", 1, sizes[source][rank]) for source in range(2)]
    dist.all_to_all(outputs, sent)
    assert [one.tolist() for one in outputs] == [
        [[10.0 * source + rank] * sizes[source][rank]] for source in range(2)
    ]


def test_all_to_all_of_lists_of_any_sizes(npu_world: Any) -> None:
    """As HCCL does, and gloo does not."""
    npu_world(2)(exchange_uneven)


def refuse() -> None:
    for dtype in (torch.float64, torch.uint8, torch.bool):
        with pytest.raises(RuntimeError, match="unsupported data type"):
            dist.all_reduce(torch.ones(3, dtype=dtype, device="npu"))
    with pytest.raises(RuntimeError, match="unsupported reduction"):
        dist.all_reduce(torch.ones(3, dtype=torch.int32, device="npu"), ReduceOp.BAND)
    gathered = torch.zeros(2, dtype=torch.float64, device="npu")
    dist.all_gather_into_tensor(gathered, torch.ones(1, dtype=torch.float64, device="npu"))
    assert gathered.tolist() == [1, 1]


def test_refuses_to_reduce_what_hccl_does_not(npu_world: Any) -> None:
    npu_world(2)(refuse)


def exchange_objects() -> None:
    rank = dist.get_rank()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": 0}, {"rank": 1}]
    box = [rank + 5]
    dist.broadcast_object_list(box, 1)
    assert box == [6]
    got: list[Any] = [None]
    dist.scatter_object_list(got, ["a", "b"] if rank == 0 else None, 0)
    assert got == ["ab"[rank]]
    dist.barrier()
    assert dist.get_backend(dist.new_group(backend="hccl")) == "hccl"


def test_objects_and_barriers(npu_world: Any) -> None:
    npu_world(2)(exchange_objects)
