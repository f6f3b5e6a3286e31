"""Writing a Hugging Face model folder from a stream of tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.agreement import Peers
from engines.durable import Written, delete, leftovers, local_folder, publish, temporary_name, write_chunks
from engines.errors import ModelError
from engines.model_folder import CONFIG, why_not_replaced
from engines.weights.model_files import ModelFiles
from engines.weights.pretrained_folder import WEIGHTS, WEIGHTS_INDEX
from engines.weights.safetensors_file import write_safetensors
from engines.weights.value_config import value_config

MAX_SHARD_BYTES = 10**9


def write_pretrained(
    stream: Iterable[tuple[str, Tensor]],
    *,
    source: ModelFiles,
    target: Path,
    dtype: torch.dtype,
    is_writer: bool,
    model_type: str = "language_model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    group: ProcessGroup | None = None,
) -> dict[str, Written]:
    """Write the folder `target` as `save_pretrained` of the model would. Every rank of `group` calls this.

    `stream`: (Hugging Face name, full tensor), drained by every rank; floating-point tensors are cast to `dtype`.
    `source`: config, tokenizer and chat template of the model that was loaded. `is_writer`: True on exactly one rank,
    which holds at most `max_shard_bytes` (or one larger tensor) in memory. `model_type`: of the stream, whatever was
    loaded; a value model becomes a sequence classification of one label.

    Returns the files that were written, by name, on the writer; elsewhere nothing.

    The folder appears when all of it is on the disk, and replaces an earlier export then. If the writer fails, the
    stream is drained all the same, so that no rank waits for another, and every rank raises `ModelError`.
    """
    peers = Peers.of(group)
    writer: FolderWriter | None = None
    files: dict[str, Written] = {}
    failure: Exception | None = None
    try:
        with peers.all_or_none(f"cannot export to {target}", error=ModelError):
            if is_writer:
                writer = FolderWriter(source, target, dtype, model_type, max_shard_bytes)
        for name, tensor in stream:
            try:
                if writer is not None and failure is None:
                    writer.add(name, tensor)
            except Exception as error:  # noqa: BLE001 (raised on all ranks when the stream has ended)
                failure = error
        with peers.all_or_none(f"cannot export to {target}", error=ModelError):
            if failure is not None:
                raise failure
            if writer is not None:
                files = writer.finish()
    finally:
        if writer is not None:
            writer.discard()
    return files


class FolderWriter:
    """Collects tensors into shards of a temporary folder; `finish` gives it its name. For one process, any thread."""

    def __init__(
        self,
        source: ModelFiles,
        target: Path,
        dtype: torch.dtype,
        model_type: str,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self._source, self._target = source, local_folder(target, error=ModelError)
        self._dtype = dtype
        self._max_shard_bytes = max_shard_bytes
        config = value_config(source.config()) if model_type == "value_model" else source.config()
        self._config = {**config, "dtype": str(dtype).removeprefix("torch.")}
        self._config.pop("torch_dtype", None)
        self._check_target()
        self._bucket: dict[str, Tensor] = {}
        self._bucket_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._shards: list[Written] = []
        self._files: dict[str, Written] = {}
        self._total_bytes = self._total_parameters = 0
        self._temporary = temporary_name(self._target)
        self._temporary.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor; write a shard if it is full without this one."""
        if name in self._shard_of:
            raise ModelError(f"the engine sent {name} twice")
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        if self._bucket and self._bucket_bytes + tensor.numel() * dtype.itemsize > self._max_shard_bytes:
            self._write_shard()
        copy = tensor.detach().to("cpu", dtype, copy=True)  # the engine may reuse what it sent
        self._bucket[name] = copy
        self._shard_of[name] = len(self._shards)
        self._bucket_bytes += copy.nbytes
        self._total_bytes += copy.nbytes
        self._total_parameters += copy.numel()

    def finish(self) -> dict[str, Written]:
        """Write what is left and all that isn't weights, and publish the folder; returns its files by name."""
        if not self._bucket:
            raise ModelError("the engine sent no weights")
        self._write_shard()
        self._name_shards()
        self._write_json(CONFIG, self._config)
        self._files |= self._source.write(self._temporary, besides={CONFIG})
        publish(self._temporary, self._target)
        for leftover in leftovers(self._target.parent):
            if leftover.target == self._target:
                delete(leftover.path)
        return self._files

    def discard(self) -> None:
        """Remove the temporary folder, unless it was published."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _check_target(self) -> None:
        target = self._target
        if target.exists() and self._source.path.exists() and target.samefile(self._source.path):
            raise ModelError(f"{target} is the model's own folder", "export to another one")
        if why := why_not_replaced(target):
            raise ModelError(why, "name an empty or new folder")

    def _write_shard(self) -> None:
        file = self._temporary / f"shard-{len(self._shards)}"
        self._shards.append(write_safetensors(file, self._bucket, {"format": "pt"}))
        self._bucket, self._bucket_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]
        for i, file in enumerate(files):
            (self._temporary / f"shard-{i}").rename(self._temporary / file)
            self._files[file] = self._shards[i]
        if count == 1:
            return
        weight_map = {name: files[i] for name, i in self._shard_of.items()}
        totals = {"total_parameters": self._total_parameters, "total_size": self._total_bytes}
        self._write_json(WEIGHTS_INDEX, {"metadata": totals, "weight_map": weight_map})

    def _write_json(self, name: str, data: dict[str, Any]) -> None:
        text = json.dumps(data, indent=2, sort_keys=True) + "\n"
        self._files[name] = write_chunks(self._temporary / name, [text.encode()])
