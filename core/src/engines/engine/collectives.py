"""The few collectives of core: over data-parallel ranks, and inside a replica. A group of None is one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.batch import Batch, TokenOutputs
from engines.contract import Ranks
from engines.errors import BatchError


def group_device(group: ProcessGroup) -> torch.device:
    """Where a group's backend wants its tensors: the CPU if it can, else its accelerator."""
    devices = group._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in devices else devices[0]


def gather_rows(row: list[float], group: ProcessGroup | None) -> Tensor:
    """Every data-parallel rank's `row` (equally long), float64 `[ranks, len(row)]` on the CPU."""
    mine = torch.tensor([row], dtype=torch.float64)
    if group is None:
        return mine
    mine = mine.to(group_device(group))
    rows = mine.new_empty((dist.get_world_size(group), len(row)))
    dist.all_gather_single(rows, mine, group=group)
    return rows.cpu()


def raise_together(message: str | None, failed: bool, group: ProcessGroup | None) -> None:
    """Raise `BatchError` on every rank if any `failed`, with the messages of those that did. Collective if failed."""
    if not failed:
        return
    messages: list[str | None] = [message]
    if group is not None:
        messages = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, message, group=group)
    lines = [f"data-parallel rank {rank}: {text}" for rank, text in enumerate(messages) if text]
    raise BatchError("\n".join(lines) if group is not None else str(message))


def share_row(row: list[float] | None, size: int, ranks: Ranks) -> list[float]:
    """The output rank's `row` of `size` numbers, on every rank of the replica."""
    if ranks.replica_group is None:
        assert row is not None, "a replica of one process holds its outputs"
        return row
    device = group_device(ranks.replica_group)
    values = torch.tensor(row if row is not None else [0.0] * size, dtype=torch.float64, device=device)
    dist.broadcast(values, src=ranks.output_rank, group=ranks.replica_group)
    return values.tolist()


def share_outputs(
    outputs: TokenOutputs | None, names: list[str], num_tokens: int, num_sequences: int, ranks: Ranks
) -> TokenOutputs:
    """The output rank's outputs, on every rank of the replica; `names` are known to all of them."""
    if ranks.replica_group is None:
        assert outputs is not None, "a replica of one process holds its outputs"
        return outputs
    device = group_device(ranks.replica_group)
    shared = {}
    for name in names:
        size = num_sequences if name == "last_values" else num_tokens
        value = getattr(outputs, name) if outputs is not None else None
        mine = torch.empty(size, device=device) if value is None else value.to(device)
        dist.broadcast(mine, src=ranks.output_rank, group=ranks.replica_group)
        shared[name] = mine if value is None else value
    return TokenOutputs(**shared)


def gather_outputs(outputs: TokenOutputs, shares: list[list[int]], batch: Batch, ranks: Ranks) -> TokenOutputs:
    """Outputs of the whole `batch` on the CPU of every data-parallel rank, from those of each one's share.

    `shares`: which sequences of `batch` each rank has, the same list on all ranks.
    """
    lengths = batch.lengths
    whole = {}
    for name, value in outputs.present().items():
        sizes = [[1 if name == "last_values" else lengths[i] for i in share] for share in shares]
        parts = _gather_uneven(value, [sum(one) for one in sizes], ranks.dp_group)
        pieces: dict[int, Tensor] = {}
        for part, share, share_sizes in zip(parts, shares, sizes, strict=True):
            pieces |= zip(share, part.split(share_sizes), strict=True)
        whole[name] = torch.cat([pieces[i] for i in range(len(batch))]) if pieces else value.cpu()
    return TokenOutputs(**whole)


def _gather_uneven(value: Tensor, sizes: list[int], group: ProcessGroup | None) -> list[Tensor]:
    if group is None:
        return [value.cpu()]
    padded = value.new_zeros(max(sizes), device=group_device(group))
    padded[: len(value)] = value
    rows = padded.new_empty((len(sizes), max(sizes)))
    dist.all_gather_single(rows, padded[None], group=group)
    return [row[:size].cpu() for row, size in zip(rows, sizes, strict=True)]
