"""Weights and optimizer state for checkpoints, under Hugging Face names, whatever the layout.

Keys are `model.NAME`, `optimizer.MOMENT.NAME` and `optimizer.step.NAME`. With an optimizer the weights are its
float32 main parameters; under the distributed optimizer each data-parallel rank hands over its own range of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from engines.contract import Shard, ShardReader
from engines.errors import CheckpointError
from engines_megatron.architectures import Architecture
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.optimizer import Optimizer, ParameterState
from engines_megatron.weights.blocks import rectangles
from engines_megatron.weights.names import Shape
from engines_megatron.weights.pieces import Piece, find_pieces, padding


@dataclass(frozen=True)
class _Cut:
    """What of a piece lies in a flat range of its parameter, one block of it."""

    piece: Piece
    offset: Shape
    """In the Hugging Face tensor."""
    shape: Shape
    begin: int
    end: int
    """Where its elements lie in the range."""
    replica: int

    def of(self, tensor: Tensor) -> Tensor:
        """The block's elements, in the memory of `tensor`, which holds the range."""
        return tensor.view(-1)[self.begin : self.end].view(self.shape)

    def shard(self, key: str, tensor: Tensor) -> Shard:
        return Shard(key, self.piece.shape, self.offset, self.of(tensor), self.replica)


def model_shards(
    chunks: Sequence[GPTChunk], architecture: Architecture, optimizer: Optimizer | None
) -> Iterator[Shard]:
    """This rank's blocks of the weights; an engine without optimizer hands over the model's own parameters."""
    states = _states(optimizer)
    for piece in find_pieces(chunks, architecture):
        if optimizer is None:
            yield Shard(f"model.{piece.name}", piece.shape, piece.offset, piece.view, int(not piece.is_first))
        elif state := states.get(piece.parameter):
            for cut in _cuts(piece, state, optimizer.distributed):
                yield cut.shard(f"model.{piece.name}", state.main)


def optimizer_shards(chunks: Sequence[GPTChunk], architecture: Architecture, optimizer: Optimizer) -> Iterator[Shard]:
    """This rank's blocks of AdamW's state. A parameter that has seen no update has none, on any rank."""
    states = _states(optimizer)
    for piece in find_pieces(chunks, architecture):
        state = states.get(piece.parameter)
        if state is None or not state.moments:
            continue
        for cut in _cuts(piece, state, optimizer.distributed):
            for moment, value in state.moments.items():
                yield cut.shard(f"optimizer.{moment}.{piece.name}", value)
            if not any(cut.offset):  # of the ranks that share the tensor, the one with its first element says it
                yield Shard(f"optimizer.step.{piece.name}", (), (), torch.tensor(state.step), cut.replica)


@torch.no_grad()
def load_model_shards(
    chunks: Sequence[GPTChunk], architecture: Architecture, optimizer: Optimizer | None, reader: ShardReader
) -> None:
    """Fill parameters and main parameters. All ranks; raises `CheckpointError` where it holds another model's."""
    states = _states(optimizer)
    pieces = find_pieces(chunks, architecture)
    for piece in pieces:
        key = f"model.{piece.name}"
        _fill(piece.view, reader, key, piece.shape, piece.offset)
        state = states.get(piece.parameter)
        if state is not None and state.main.dtype != piece.parameter.dtype:
            for cut in _cuts(piece, state, distributed=True):
                _fill(cut.of(state.main), reader, key, piece.shape, cut.offset)
    for rows in padding(chunks, pieces):
        rows.zero_()


@torch.no_grad()
def load_optimizer_shards(
    chunks: Sequence[GPTChunk], architecture: Architecture, optimizer: Optimizer, reader: ShardReader
) -> None:
    """Fill AdamW's state; parameters without state in the checkpoint have none afterwards. All ranks."""
    optimizer.forget()
    states, keys = _states(optimizer), reader.keys()
    created: dict[Parameter, ParameterState] = {}
    for piece in find_pieces(chunks, architecture):
        step = f"optimizer.step.{piece.name}"
        if piece.parameter not in states or step not in keys:
            continue
        if piece.parameter not in created:
            created[piece.parameter] = optimizer.create_moments(piece.parameter, int(reader.read(step, (), ())))
        state = created[piece.parameter]
        for cut in _cuts(piece, state, distributed=True):
            for moment, value in state.moments.items():
                key = f"optimizer.{moment}.{piece.name}"
                _fill(cut.of(value), reader, key, piece.shape, cut.offset)


def _states(optimizer: Optimizer | None) -> Mapping[Parameter, ParameterState]:
    return {state.parameter: state for state in optimizer.states()} if optimizer is not None else {}


def _cuts(piece: Piece, state: ParameterState, distributed: bool) -> Iterator[_Cut]:
    """The blocks of `piece` in the range of `state`; `distributed`: which no other data-parallel rank has."""
    view = piece.view
    first = piece.row * (view.numel() // len(view))
    start = min(max(state.start - first, 0), view.numel())
    stop = max(min(state.stop - first, view.numel()), start)
    replica = any(piece.replica[:2] if distributed else piece.replica)
    for block in rectangles(view.shape, start, stop):
        offset = tuple(i + j for i, j in zip(piece.offset, block.offset, strict=True))
        begin = first + block.begin - state.start
        yield _Cut(piece, offset, block.shape, begin, begin + block.end - block.begin, int(replica))


def _fill(target: Tensor, reader: ShardReader, key: str, whole: Shape, offset: Shape) -> None:
    found = tuple(reader.shape(key))
    if found != whole:
        raise CheckpointError(
            f"{key} has shape {found} in the checkpoint and {whole} in this model",
            "load a checkpoint of the same model",
        )
    reader.read_into(key, offset, target)
