"""From the shards that ranks hold to the index of what was written where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from engines.checkpoint_folder.manifest import Index, Part, Piece, TensorRecord
from engines.contract import Shard
from engines.errors import ContractError
from engines.weights.safetensors_file import DTYPE_NAMES

PARTS: tuple[Part, ...] = ("model", "optimizer")


@dataclass(frozen=True)
class Described:
    """What a rank knows of a tensor, whether it writes a piece of it or not."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class RankPieces:
    """One rank's contribution: entries to write, by file, and what they are."""

    files: dict[str, dict[str, Tensor]]
    described: dict[str, Described]


def rank_pieces(shards: Iterable[Shard], rank: int, size: int) -> RankPieces:
    """Sort a rank's shards into the files that it writes, one per part; copies and empty pieces are left out.

    Raises `ContractError` for shards that no checkpoint can hold, naming the key.
    """
    result = RankPieces({}, {})
    for shard in shards:
        part = _checked_part(shard)
        shape, dtype = tuple(shard.global_shape), DTYPE_NAMES[shard.tensor.dtype]
        described = result.described.setdefault(shard.key, Described(shape, dtype))
        if (described.shape, described.dtype) != (shape, dtype):
            raise ContractError(f"shards of {shard.key} disagree: {described.shape} and {shape}")
        if shard.replica != 0 or shard.tensor.numel() == 0:
            continue
        file = f"{part}-{rank:05d}-of-{size:05d}.safetensors"
        entries = result.files.setdefault(file, {})
        entry = shard.key if shard.key not in entries else f"{shard.key}@{','.join(map(str, shard.offset))}"
        entries[entry] = shard.tensor
        described.pieces.append(Piece(file=file, entry=entry, offset=shard.offset, shape=shard.tensor.shape))
    return result


def merge(by_rank: Sequence[dict[str, Described]]) -> Index:
    """The index of all ranks' pieces. Raises `ContractError` unless they cover every tensor exactly once."""
    merged: dict[str, Described] = {}
    for rank, described in enumerate(by_rank):
        for key, one in described.items():
            known = merged.setdefault(key, Described(one.shape, one.dtype))
            if (known.shape, known.dtype) != (one.shape, one.dtype):
                raise ContractError(
                    f"{key} is {one.dtype} {one.shape} on rank {rank}, {known.dtype} {known.shape} on an earlier one"
                )
            known.pieces.extend(one.pieces)
    for key, whole in merged.items():
        _check_cover(key, whole)
    return Index(
        tensors={
            key: TensorRecord(shape=whole.shape, dtype=whole.dtype, pieces=tuple(whole.pieces))
            for key, whole in sorted(merged.items())
        }
    )


def overlap(
    offset: Sequence[int], shape: Sequence[int], piece: Piece
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a block and a piece meet: as slices of the block, and as slices of the piece; None if they don't."""
    in_block, in_piece = [], []
    for start, length, piece_start, piece_length in zip(offset, shape, piece.offset, piece.shape, strict=True):
        low, high = max(start, piece_start), min(start + length, piece_start + piece_length)
        if low >= high:
            return None
        in_block.append(slice(low - start, high - start))
        in_piece.append(slice(low - piece_start, high - piece_start))
    return tuple(in_block), tuple(in_piece)


def is_block(whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a block of `shape` at `offset` lies in a tensor of shape `whole`."""
    return len(whole) == len(offset) == len(shape) and all(
        start >= 0 and length >= 0 and start + length <= full
        for start, length, full in zip(offset, shape, whole, strict=True)
    )


def _checked_part(shard: Shard) -> str:
    part = shard.key.partition(".")[0]
    if part not in PARTS:
        raise ContractError(f"shard {shard.key}: keys begin with {' or '.join(f'{part}.' for part in PARTS)}")
    if shard.tensor.dtype not in DTYPE_NAMES:
        raise ContractError(f"shard {shard.key}: a checkpoint can't hold {shard.tensor.dtype}")
    whole, offset, shape = tuple(shard.global_shape), tuple(shard.offset), tuple(shard.tensor.shape)
    if not is_block(whole, offset, shape):
        raise ContractError(f"shard {shard.key}: {shape} at {offset} is no block of {whole}")
    return part


def _check_cover(key: str, whole: Described) -> None:
    reaching: list[Piece] = []
    for piece in sorted(whole.pieces, key=lambda piece: piece.offset):
        reaching = [one for one in reaching if _last_row(one) >= piece.offset[:1]]
        other = next((one for one in reaching if overlap(one.offset, one.shape, piece)), None)
        if other is not None:
            raise ContractError(
                f"{key}: the pieces at {other.offset} in {other.file} and at {piece.offset} in {piece.file} overlap;"
                " of what several ranks hold alike, only one may say replica 0"
            )
        reaching.append(piece)
    covered = sum(prod(piece.shape) for piece in whole.pieces)
    if covered != prod(whole.shape):
        raise ContractError(
            f"{key}: the ranks' pieces hold {covered} of the {prod(whole.shape)} elements of {whole.shape}"
        )


def _last_row(piece: Piece) -> tuple[int, ...]:
    return tuple(start + length - 1 for start, length in zip(piece.offset[:1], piece.shape[:1], strict=True))
