"""The weights as a lazy stream of full tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from engines_megatron.architectures import Architecture
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.weights.names import SCORE, Shape, tensor_shapes
from engines_megatron.weights.pieces import Piece, find_pieces

Block = tuple[Shape, Shape]
"""(offset, shape) of a part of a tensor."""


def export_weights(
    chunks: Sequence[GPTChunk], architecture: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) as `save_pretrained` would write them, in order of depth, as `dtype`.

    Every rank drains it: each step sends one tensor's blocks, already cast, from the ranks that hold them to all
    others; two copies of that tensor at most are held beside the model.
    """
    mine = {
        name: list(pieces)
        for name, pieces in groupby(
            sorted((piece for piece in find_pieces(chunks, architecture) if piece.is_first), key=lambda p: p.name),
            key=lambda piece: piece.name,
        )
    }
    blocks = {name: [(piece.offset, tuple(piece.view.shape)) for piece in pieces] for name, pieces in mine.items()}
    by_rank: list[dict[str, list[Block]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, blocks)
    device = next(chunks[0].parameters()).device
    for name, shape in _all_tensors(architecture).items():
        owners = {rank: held[name] for rank, held in enumerate(by_rank) if name in held}
        if owners:
            yield name, _assemble(shape, owners, mine.get(name, []), dtype, device)


def _all_tensors(architecture: Architecture) -> Mapping[str, Shape]:
    """Of the language model, and of the value model in place of whose head it has its own."""
    shapes = dict(tensor_shapes(architecture, "language_model"))
    return {**shapes, SCORE: tensor_shapes(architecture, "value_model")[SCORE]}


@torch.no_grad()
def _assemble(
    shape: Shape, owners: Mapping[int, list[Block]], mine: Sequence[Piece], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The tensor, from each of `owners` in turn; a tensor of its own, never the model's memory."""
    full = torch.empty(shape, dtype=dtype, device=device)
    assert sum(prod(size) for blocks in owners.values() for _, size in blocks) == full.numel(), "blocks overlap"
    for rank, blocks in owners.items():
        if rank == dist.get_rank():
            sent = torch.cat([piece.view.to(dtype).flatten() for piece in mine])
        else:
            sent = torch.empty(sum(prod(size) for _, size in blocks), dtype=dtype, device=device)
        dist.broadcast(sent.view(torch.uint8), rank)
        for (offset, size), values in zip(blocks, sent.split([prod(size) for _, size in blocks]), strict=True):
            index = tuple(slice(start, start + extent) for start, extent in zip(offset, size, strict=True))
            full[index] = values.view(size)
    return full
