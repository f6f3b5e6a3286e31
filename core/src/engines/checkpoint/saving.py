"""Writing a checkpoint: all of it or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed import ProcessGroup

from engines.agreement import Peers
from engines.checkpoint.pieces import PARTS, Described, merge, rank_pieces
from engines.checkpoint.rank_state import write_rank_state
from engines.checkpoint_folder import INDEX, MANIFEST, STATE, CheckpointInfo, Manifest, strict_json
from engines.checkpoint_folder.manifest import FileRecord, seal
from engines.contract import Shard
from engines.durable import Written, local_folder, publish, temporary_name, write_chunks
from engines.errors import CheckpointError, ContractError
from engines.weights import ModelFiles
from engines.weights.safetensors_file import write_safetensors


def save(
    path: str | Path,
    *,
    shards: Iterable[Shard],
    state: dict[str, Any] | None,
    rank_state: dict[str, Any] | None,
    info: CheckpointInfo,
    model_files: ModelFiles,
    group: ProcessGroup | None = None,
) -> None:
    """Write one checkpoint to the folder `path`, which all ranks see. Every rank of `group` calls this.

    `shards`: this rank's, as the engine yields them; they are held until they are written. `state`: JSON values,
    equal on all ranks. `rank_state`: this rank's own, JSON values and tensors. Neither is written where it is None.
    `model_files`: what makes the weights a model; the first rank writes those that it has. `group`: None for all
    processes.

    The files are written under a temporary name, the manifest last, and the folder gets its name when the disk
    has everything; an earlier checkpoint of that name is replaced then and not before. If it fails on one rank
    (disk full, ...), every rank raises `CheckpointError` with that rank's cause, and nothing is left behind.
    Shards that contradict each other, or don't cover a tensor, are the engine's fault and named in the error.
    """
    peers = Peers.of(group)
    assert info.world_size == peers.size, f"info says {info.world_size} ranks, {peers.size} save"
    target = local_folder(path, error=CheckpointError)
    doing = f"cannot save {target}"
    temporary: Path = peers.broadcast(temporary_name(target))
    try:
        with peers.all_or_none(doing, error=CheckpointError):
            pieces = rank_pieces(shards, peers.rank, peers.size)
            encoded_state = strict_json.encode(state, what="state", indent=1) if state is not None else None
            if peers.is_first:
                temporary.mkdir(parents=True)
        with peers.all_or_none(doing, error=CheckpointError):
            written = {}
            if rank_state is not None:
                name = f"rank-{peers.rank:05d}-of-{peers.size:05d}.safetensors"
                written[name] = write_rank_state(temporary / name, rank_state)
            for name, entries in pieces.files.items():
                written[name] = write_safetensors(temporary / name, entries)
        reports = peers.gather((pieces.described, written, xxhash.xxh3_128_hexdigest(encoded_state or b"")))
        with peers.all_or_none(doing, error=CheckpointError):
            if peers.is_first:
                _complete(temporary, info, reports, encoded_state, model_files)
                publish(temporary, target)
    except BaseException:
        if peers.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _complete(
    temporary: Path,
    info: CheckpointInfo,
    reports: list[tuple[dict[str, Described], dict[str, Written], str]],
    encoded_state: bytes | None,
    model_files: ModelFiles,
) -> None:
    """Write what describes the ranks' files, the manifest last."""
    described, written, states = zip(*reports, strict=True)
    odd = next((rank for rank, digest in enumerate(states) if digest != states[0]), None)
    if odd is not None:
        raise ContractError(f"the state of rank {odd} differs from that of rank 0; it must be equal on all ranks")
    index = merge(described)
    files = {name: record for of_rank in written for name, record in of_rank.items()}
    files |= model_files.write(temporary)
    files[INDEX] = write_chunks(temporary / INDEX, [index.model_dump_json().encode()])
    if encoded_state is not None:
        files[STATE] = write_chunks(temporary / STATE, [encoded_state])
    manifest = Manifest(
        info=info,
        contents=tuple(part for part in PARTS if any(key.startswith(f"{part}.") for key in index.tensors)),
        files={name: FileRecord(size=one.size, xxh3=one.xxh3) for name, one in sorted(files.items())},
    )
    write_chunks(temporary / MANIFEST, [seal(manifest)])
