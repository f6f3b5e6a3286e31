"""Reading a checkpoint, at any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.agreement import Peers
from engines.checkpoint.pieces import is_block, overlap
from engines.checkpoint.rank_state import read_rank_state
from engines.checkpoint_folder import STATE, CheckpointInfo, Manifest, read_manifest, strict_json
from engines.checkpoint_folder.faults import faults
from engines.checkpoint_folder.manifest import Index, Piece, TensorRecord, read_index
from engines.checkpoint_folder.model import check_held
from engines.durable import local_folder
from engines.errors import CheckpointError, did_you_mean
from engines.weights.safetensors_file import DTYPES, SafetensorsFile


class Checkpoint:
    """A complete checkpoint on disk. Any process may open one; `engines.checkpoint.open` also verifies it.

    Raises `CheckpointError` where the folder is missing, incomplete or damaged, naming the file. Nothing in it is
    ever unpickled or run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_folder(path, error=CheckpointError)
        self.manifest: Manifest = read_manifest(self.path)

    @property
    def info(self) -> CheckpointInfo:
        """Which step, engine, model and layout it is of."""
        return self.manifest.info

    @cached_property
    def index(self) -> Index:
        """Where the pieces of every tensor lie."""
        return read_index(self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """What `save` was given as `state`."""
        state: dict[str, Any] = strict_json.read(self.path / STATE)
        return state

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What `rank` gave to `save` as `rank_state`; None where fewer ranks saved."""
        size = self.info.world_size
        if rank >= size:
            return None
        return read_rank_state(self.path / f"rank-{rank:05d}-of-{size:05d}.safetensors")

    def reader(self, parts: Iterable[str]) -> PartReader:
        """Tensors of the named parts ("model", "optimizer"). Raises `CheckpointError` if one wasn't saved."""
        wanted = frozenset(parts)
        check_held(self.path, self.manifest, wanted)
        return PartReader(
            self.path, {k: record for k, record in self.index.tensors.items() if k.partition(".")[0] in wanted}
        )

    def faults(self, *, checksums: bool = True, files: Iterable[str] | None = None) -> list[str]:
        """One line for each of `files` (None: all) that is not as it was written; without `checksums` by size."""
        return faults(self.path, self.manifest, checksums=checksums, files=files)

    def verify(self, group: ProcessGroup | None = None, *, needed: Callable[[str], bool] | None = None) -> None:
        """Compare sizes and checksums; the ranks of `group`, which all call this, share the work.

        `needed`: of which files, by name; None: of all. Raises `CheckpointError` on every rank, with one line per
        damaged file of the first rank that found any.
        """
        peers = Peers.of(group)
        names = sorted(filter(needed, self.manifest.files) if needed else self.manifest.files)
        with peers.all_or_none(f"{self.path} is damaged", error=CheckpointError):
            faults = self.faults(files=names[peers.rank :: peers.size])
            if faults:
                raise CheckpointError(
                    "\n".join(faults),
                    "Restore it from a copy, or move it away: a run goes on from the one before it, if there is one.",
                )


class PartReader:
    """`engines.contract.ShardReader` of a checkpoint: reads the pieces that a block overlaps, and no others."""

    def __init__(self, path: Path, tensors: dict[str, TensorRecord]) -> None:
        self._path = path
        self._tensors = tensors
        self._files: dict[str, SafetensorsFile] = {}

    def keys(self) -> frozenset[str]:
        """Every key of the parts that are being loaded."""
        return frozenset(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor. Raises `CheckpointError` with the closest key if it is unknown."""
        return self._record(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor as it was saved."""
        return DTYPES[self._record(key).dtype]

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block at `offset` with `shape`, on the CPU, in the dtype that was saved. It may be memory of the file.

        Raises `CheckpointError` for an unknown key, a block that reaches out of the tensor, and a file that isn't
        what the index says.
        """
        record = self._checked(key, offset, shape)
        for piece in record.pieces:
            if (piece.offset, piece.shape) == (tuple(offset), tuple(shape)):
                return self._file(record, piece).read(piece.entry)
        block = torch.empty(tuple(shape), dtype=DTYPES[record.dtype])
        self.read_into(key, offset, block)
        return block

    @torch.no_grad()
    def read_into(self, key: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill `target`, on any device and of any dtype, with the block at `offset` of its shape.

        What lies in the file as it does in the CPU's memory is read straight into it. Raises what `read` raises.
        """
        record = self._checked(key, offset, target.shape)
        covered = 0
        for piece in record.pieces:
            meeting = overlap(offset, target.shape, piece)
            if meeting:
                in_block, in_piece = meeting
                block = target[in_block]
                self._file(record, piece).read_into(block, piece.entry, in_piece)
                covered += block.numel()
        if covered != target.numel():
            raise CheckpointError(
                f"{self._path}: only {covered} of {target.numel()} elements of {key} at {tuple(offset)} are there"
            )

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _record(self, key: str) -> TensorRecord:
        if key not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {key!r}.{did_you_mean(key, self._tensors)}")
        return self._tensors[key]

    def _checked(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> TensorRecord:
        record = self._record(key)
        if not is_block(record.shape, offset, shape):
            raise CheckpointError(
                f"{self._path}: {key} has shape {record.shape}; {tuple(shape)} at {tuple(offset)} reaches out of it"
            )
        return record

    def _file(self, record: TensorRecord, piece: Piece) -> SafetensorsFile:
        """The file of a piece, which is as the index says."""
        file = self._files.get(piece.file)
        if file is None:
            file = self._files[piece.file] = SafetensorsFile(self._path / piece.file, error=CheckpointError)
        found = (file.shape(piece.entry), file.dtype(piece.entry))
        if found != (piece.shape, DTYPES[record.dtype]):
            raise CheckpointError(
                f"{file.path}: {piece.entry} is {found[1]} {found[0]}, the index says {record.dtype} {piece.shape}"
            )
        return file


def open(
    path: str | Path, *, group: ProcessGroup | None = None, needed: Callable[[str], bool] | None = None
) -> Checkpoint:
    """Open a checkpoint and verify it, or the files that are `needed`. Every rank of `group` calls this.

    Raises `CheckpointError`, on every rank, if it is missing, incomplete or damaged.
    """
    with Peers.of(group).all_or_none(f"cannot open {path}", error=CheckpointError):
        checkpoint = Checkpoint(path)
    checkpoint.verify(group, needed=needed)
    return checkpoint
