"""Which blocks of which Hugging Face tensors lie in this rank's parameters, at any layout.

Megatron's `sharded_state_dict` says which block of which global Megatron tensor a parameter holds, and `segments`
what the rows of that are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter

from engines_megatron.architectures import Architecture
from engines_megatron.model.chunk import GPTChunk
from engines_megatron.weights.names import Shape
from engines_megatron.weights.segments import segments, tensor_shape


@dataclass(frozen=True)
class Piece:
    """A block of a Hugging Face tensor that is whole rows of a parameter of this rank."""

    name: str
    """The tensor's name."""
    shape: Shape
    """The whole tensor's."""
    offset: Shape
    """Where in the tensor the block begins."""
    parameter: Parameter
    row: int
    """The parameter's first row that belongs to the block."""
    rows: int
    replica: tuple[int, int, int]
    """Which copy of the block this is: over pipeline stages (a tied head is 1), over tensor-parallel ranks, over
    data- and context-parallel ranks. All zero on exactly one rank."""

    @property
    def is_first(self) -> bool:
        """Whether this is the copy that stands for all others."""
        return not any(self.replica)

    @property
    def view(self) -> Tensor:
        """The block itself, in the parameter's memory."""
        return self.of(self.parameter.detach())

    def of(self, tensor: Tensor) -> Tensor:
        """The block in another tensor of the parameter's shape, its gradient for instance."""
        return tensor[self.row : self.row + self.rows]


def find_pieces(chunks: Sequence[GPTChunk], architecture: Architecture) -> list[Piece]:
    """Everything that this rank holds. Communicates nothing; parameters keep what they hold.

    A piece covers each row of each parameter, those aside that fill up the vocabulary (`padding`).
    """
    found: list[Piece] = []
    for chunk in chunks:
        seen: set[int] = set()
        for parameter, row, block in _blocks(chunk):
            found += _pieces(parameter, row, block, architecture)
            seen.add(id(parameter))
        absent = [name for name, parameter in chunk.named_parameters() if id(parameter) not in seen]
        assert not absent, f"not in the sharded state dict: {absent}"
    return found


def padding(chunks: Sequence[GPTChunk], pieces: Iterable[Piece]) -> Iterator[Tensor]:
    """Views of the rows of parameters that no piece covers: the last ones of a vocabulary that was filled up."""
    covered: dict[Parameter, int] = {}
    for piece in pieces:
        assert covered.get(piece.parameter, 0) == piece.row, f"{piece.name} does not follow the piece before it"
        covered[piece.parameter] = piece.row + piece.rows
    for chunk in chunks:
        for parameter in chunk.parameters():
            rows = covered.get(parameter, 0)
            if rows < len(parameter):
                yield parameter.detach()[rows:]


def _blocks(chunk: GPTChunk) -> Iterator[tuple[Parameter, int, ShardedTensor]]:
    """(parameter, first row of it, what the rows from there on are) of everything that `chunk` holds."""
    metadata = {
        "singleton_local_shards": True,
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    # the language model's own looks for a head over the vocabulary, which a value model has none of
    described = MegatronModule if hasattr(chunk, "score") else type(chunk)
    for entry in described.sharded_state_dict(chunk, metadata=metadata).values():
        if isinstance(entry, ShardedTensor):
            yield _parameter(entry), 0, entry
        elif isinstance(entry, ShardedTensorFactory):
            row = 0
            for part in entry.build():
                yield _parameter(entry), row, part
                row += part.local_shape[0]
        else:
            assert isinstance(entry, ShardedObject) and entry.key.endswith("_extra_state"), entry


def _parameter(entry: ShardedTensor | ShardedTensorFactory) -> Parameter:
    assert isinstance(entry.data, Parameter) and entry.data.is_contiguous(), entry.key
    return entry.data


def _pieces(parameter: Parameter, row: int, block: ShardedTensor, architecture: Architecture) -> Iterator[Piece]:
    assert block.prepend_axis_num == 0, f"{block.key}: layers and experts must be tensors of their own"
    begin, end = block.global_offset[0], block.global_offset[0] + block.local_shape[0]
    first = 0
    for name, first_in_name, rows in segments(block.key, architecture):
        low, high = max(begin, first), min(end, first + rows)
        shape = tensor_shape(name, architecture)
        assert shape[1:] == tuple(block.global_shape[1:]), f"{block.key}: {block.global_shape} is not {shape}"
        if low < high:
            yield Piece(
                name=name,
                shape=shape,
                offset=(first_in_name + low - first, *block.global_offset[1:]),
                parameter=parameter,
                row=row + low - begin,
                rows=high - low,
                replica=block.replica_id,
            )
        first += rows
    assert first == block.global_shape[0] or (first < block.global_shape[0] and block.allow_shape_mismatch), (
        f"{block.key} has {block.global_shape[0]} rows, {first} of which are known"
    )
