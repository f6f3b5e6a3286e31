"""Writing a checkpoint: all of it or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.agreement import Peers
from engines.checkpoint.pieces import PARTS, Described, RankPieces, merge, rank_pieces
from engines.checkpoint.rank_state import write_rank_state
from engines.checkpoint_folder import COPY, INDEX, MANIFEST, STATE, CheckpointInfo, Manifest, strict_json
from engines.checkpoint_folder.faults import faults
from engines.checkpoint_folder.manifest import FileRecord, seal
from engines.contract import Shard
from engines.durable import Written, local_folder, publish, temporary_name, write_chunks
from engines.errors import CheckpointError, ContractError, ModelError
from engines.weights import ModelFiles, write_pretrained
from engines.weights.safetensors_file import write_safetensors
from engines.weights.write_pretrained import FolderWriter

_AT_ONCE = 2
"""Files that a rank writes at a time."""
_left: set[Path] = set()
"""What failed saves of this process could not remove either, as where a permission was lost."""


@dataclass(frozen=True)
class Contents:
    """What one rank gives to a checkpoint."""

    shards: Iterable[Shard]
    """This rank's, as the engine yields them; they are held until they are written."""
    state: dict[str, Any] | None
    """JSON values, equal on all ranks; None: neither it nor `rank_state` is written."""
    rank_state: dict[str, Any] | None
    """This rank's own, JSON values and tensors."""
    info: CheckpointInfo
    model_files: ModelFiles
    """What makes the weights a model; the first rank writes those that it has."""
    copy: tuple[Iterable[tuple[str, Tensor]], torch.dtype] | None = None
    """For a Hugging Face copy: the stream of an export, which every rank drains, and the dtype to write."""


class KeepsCopies(Protocol):
    """Memory of the host that outlives a step."""

    def take(self, files: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies of all entries, which nobody changes until the next call."""
        ...


def save(
    path: str | Path,
    *,
    shards: Iterable[Shard],
    state: dict[str, Any] | None,
    rank_state: dict[str, Any] | None,
    info: CheckpointInfo,
    model_files: ModelFiles,
    copy: tuple[Iterable[tuple[str, Tensor]], torch.dtype] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Write one checkpoint to the folder `path`, which all ranks see. Every rank of `group` (None: all) calls this.

    The rest: see `Contents`. The files are written under a temporary name, the manifest last, and the folder gets its
    name when the disk has everything; an earlier checkpoint of that name is replaced then and not before. If it fails
    on one rank (disk full, ...), every rank raises `CheckpointError` with that rank's cause, and nothing is left
    behind. Shards that contradict each other, or don't cover a tensor, are the engine's fault and named in the error.
    """
    saving = Saving(path, Contents(shards, state, rank_state, info, model_files, copy), group=group)
    saving.complete(saving.write)


class Saving:
    """A checkpoint on its way to the disk. All ranks make one; then each calls `write`, and all `complete`.

    What fails up to the end of `complete` raises `CheckpointError` on all ranks, and leaves nothing.
    """

    def __init__(
        self,
        path: str | Path,
        contents: Contents,
        *,
        copies: KeepsCopies | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Take what is to be written. `copies`: by copy, so that training may go on before it is written."""
        self.target = local_folder(path, error=CheckpointError)
        self._doing = f"cannot save {self.target}"
        self._peers = Peers.of(group)
        self._info, self._model_files = contents.info, contents.model_files
        assert self._info.world_size == self._peers.size, (
            f"info says {self._info.world_size} ranks, {self._peers.size} save"
        )
        self._temporary: Path = self._peers.broadcast(temporary_name(self.target))
        self._written: dict[str, Written] = {}
        self._export: list[tuple[str, Tensor]] = []
        try:
            self._take(contents, copies)
            if contents.copy is not None:
                self._take_export(*contents.copy, later=copies is not None)
        except BaseException:
            self._discard()
            raise

    def write(self) -> None:
        """Write this rank's files. Holds no collective, so a thread may call it."""
        if self._rank_state is not None:
            name = f"rank-{self._peers.rank:05d}-of-{self._peers.size:05d}.safetensors"
            self._written[name] = write_rank_state(self._temporary / name, self._rank_state)
        # So that one is written while the disk is awaited for another.
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            begun = {
                name: threads.submit(write_safetensors, self._temporary / name, entries)
                for name, entries in self._pieces.files.items()
            }
            self._written |= {name: writing.result() for name, writing in begun.items()}
        if self._export:
            self._write_export()

    def complete(self, outcome: Callable[[], None]) -> None:
        """Write what describes the ranks' files, the manifest last, and give the folder its name. All ranks.

        `outcome`: returns when this rank's `write` has, or raises what that raised.
        """
        try:
            with self._peers.all_or_none(self._doing, error=CheckpointError):
                outcome()
            digest = xxhash.xxh3_128_hexdigest(self._state or b"")
            reports = self._peers.gather((self._pieces.described, self._written, digest))
            with self._peers.all_or_none(self._doing, error=CheckpointError):
                if self._peers.is_first:
                    self._describe(reports)
                    publish(self._temporary, self.target)
                    _sweep()
        except BaseException:
            self._discard()
            raise

    def _take(self, contents: Contents, copies: KeepsCopies | None) -> None:
        with self._peers.all_or_none(self._doing, error=CheckpointError):
            state = contents.state
            self._state = strict_json.encode(state, what="state", indent=1) if state is not None else None
            self._rank_state = contents.rank_state
            self._pieces = rank_pieces(contents.shards, self._peers.rank, self._peers.size)
            if copies is not None:
                self._pieces = RankPieces(copies.take(self._pieces.files), self._pieces.described)
            if self._peers.is_first:
                self._temporary.mkdir(parents=True)

    def _take_export(self, stream: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, later: bool) -> None:
        """Drain the stream: onto the disk, or, if that must wait, into the first rank's memory."""
        self._dtype = dtype
        if later:
            self._export = [
                (name, tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True))
                for name, tensor in stream
                if self._peers.is_first
            ]
            return
        try:
            files = write_pretrained(
                stream,
                source=self._model_files,
                target=self._temporary / COPY,
                dtype=dtype,
                is_writer=self._peers.is_first,
                model_type=self._info.model_type,
                group=self._peers.group,
            )
        except ModelError as error:
            raise CheckpointError(f"{self._doing}: {error.message}", error.remedy) from error
        self._written |= {f"{COPY}/{name}": written for name, written in files.items()}

    def _write_export(self) -> None:
        writer = FolderWriter(self._model_files, self._temporary / COPY, self._dtype, self._info.model_type)
        for name, tensor in self._export:
            writer.add(name, tensor)
        self._export = []
        self._written |= {f"{COPY}/{name}": written for name, written in writer.finish().items()}

    def _describe(self, reports: list[tuple[dict[str, Described], dict[str, Written], str]]) -> None:
        """Write the files that describe those of ranks. The first rank alone."""
        temporary = self._temporary
        described, written, states = zip(*reports, strict=True)
        odd = next((rank for rank, digest in enumerate(states) if digest != states[0]), None)
        if odd is not None:
            raise ContractError(f"the state of rank {odd} differs from that of rank 0; it must be equal on all ranks")
        index = merge(described)
        files = {name: record for of_rank in written for name, record in of_rank.items()}
        files |= self._model_files.write(temporary)
        files[INDEX] = write_chunks(temporary / INDEX, [index.model_dump_json().encode()])
        if self._state is not None:
            files[STATE] = write_chunks(temporary / STATE, [self._state])
        manifest = Manifest(
            saved=datetime.now(UTC).replace(microsecond=0),
            info=self._info,
            contents=tuple(part for part in PARTS if any(key.startswith(f"{part}.") for key in index.tensors)),
            files={name: FileRecord(size=one.size, xxh3=one.xxh3) for name, one in sorted(files.items())},
        )
        if lost := faults(temporary, manifest, checksums=False):
            raise CheckpointError(f"somebody changed files while they were being written: {lost[0]}")
        write_chunks(temporary / MANIFEST, [seal(manifest)])

    def _discard(self) -> None:
        if self._peers.is_first:
            _left.add(self._temporary)
            _sweep()


def _sweep() -> None:
    """Remove what is left, or as much of it as can be; also files that ranks wrote there meanwhile."""
    for path in tuple(_left):
        shutil.rmtree(path, ignore_errors=True)
        try:
            path.lstat()
        except FileNotFoundError:
            _left.discard(path)
        except OSError:
            continue
