"""Tensors cut over ranks in several ways, and what else a checkpoint needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines import checkpoint
from engines.checkpoint import CheckpointInfo, ModelFingerprint
from engines.checkpoint_folder import MANIFEST
from engines.contract import Shard
from engines.weights import ModelFiles

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "rope": {"theta": 1e4}}


MODEL_FILES = ModelFiles(
    Path("model"), {"config.json": json.dumps(CONFIG).encode(), "additional_chat_templates/a b.jinja": b"{{ hello }}"}
)


def info(step: int = 20, world_size: int = 1, **changes: Any) -> CheckpointInfo:
    """Of a run that doesn't exist."""
    plain: dict[str, Any] = {
        "step": step,
        "backend": "fsdp2",
        "device": "cpu",
        "distributions": {"engines-core": "0.1.0"},
        "model": ModelFingerprint(config=CONFIG, tokenizer_xxh3="00ff"),
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.999]},
        "world_size": world_size,
        "layout": {"data_parallel_size": world_size, "sequence_parallel": False},
    }
    return CheckpointInfo(**{**plain, **changes})


def tensors() -> dict[str, Tensor]:
    """By key: sizes that ranks don't divide, fewer rows than ranks, no dimension, no element."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "model.even": draw(12, 5),
        "model.uneven": draw(7, 3),
        "model.few_rows": draw(2, 6, dtype=torch.bfloat16),
        "model.wide": draw(3, 11),
        "model.vector": draw(5),
        "model.scale": draw(dtype=torch.bfloat16),
        "model.nothing": draw(0, 4),
        "optimizer.even.exp_avg": draw(12, 5, dtype=torch.float64),
        "optimizer.even.step": torch.tensor(3, dtype=torch.int64),
        "optimizer.mask": torch.tensor([True, False, True]),
    }


def block(key: str, shape: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a rank's block, cut as `torch.chunk` does: by rows, `model.wide` by columns."""
    if not shape:
        return (), ()
    dim = 1 if key == "model.wide" else 0
    step = -(-shape[dim] // size)
    start = min(rank * step, shape[dim])
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = start, min(step, shape[dim] - start)
    return tuple(offset), tuple(extent)


def cut(key: str, whole: Tensor, rank: int, size: int) -> Shard:
    """A rank's shard of `whole`; a tensor without dimensions is held by all, and written by the first."""
    offset, shape = block(key, tuple(whole.shape), rank, size)
    piece = whole[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
    return Shard(key, tuple(whole.shape), offset, piece, replica=rank if not shape else 0)


def cut_all(whole: dict[str, Tensor], rank: int, size: int) -> Iterator[Shard]:
    """A rank's shards of all tensors."""
    return (cut(key, tensor, rank, size) for key, tensor in whole.items())


def save_whole(path: Path, *, step: int = 20, **changes: Any) -> None:
    """Save `tensors()` from one process."""
    arguments: dict[str, Any] = {
        "shards": cut_all(tensors(), 0, 1),
        "state": {"position": step, "schedule": {"last": 0.25}},
        "rank_state": {"generator": torch.arange(4)},
        "info": info(step),
        "model_files": MODEL_FILES,
    }
    checkpoint.save(path, **{**arguments, **changes})


def save_on_rank(path: Path, whole: dict[str, Tensor], **changes: Any) -> None:
    """Save this rank's cut of `whole`; runs on every rank of a world."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arguments: dict[str, Any] = {
        "shards": cut_all(whole, rank, size),
        "state": {"position": 20},
        "rank_state": {"rank": rank, "generator": torch.tensor([rank])},
        "info": info(world_size=size),
        "model_files": MODEL_FILES,
    }
    checkpoint.save(path, **{**arguments, **changes})


def written(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, by path; of a manifest not when it was saved, nor the checksum that covers that."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if MANIFEST in files:
        manifest = json.loads(files[MANIFEST])
        files[MANIFEST] = json.dumps(
            {key: manifest[key] for key in manifest.keys() - {"saved", "xxh3"}}, sort_keys=True
        ).encode()
    return files
