"""One safetensors file: sliced reading, and writing with a checksum on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.checkpoint_folder.manifest import DTYPES as TORCH_NAMES
from engines.durable import Written, write_chunks
from engines.errors import EnginesError

Index = tuple[slice, ...]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in TORCH_NAMES.items()}
"""The format's names of the dtypes that are read and written."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

assert sys.byteorder == "little", "safetensors files are little-endian, and tensors are written as they lie"


class SafetensorsFile:
    """A file opened for reading; only what is asked for is read. Close it, or let it go out of scope.

    `error` is raised, naming the file, where it is missing, truncated or not safetensors, and where an entry
    is unknown or has a dtype that isn't in `DTYPES`.
    """

    def __init__(self, path: Path, *, error: type[EnginesError]) -> None:
        self.path = path
        self._error = error
        self._file: Any
        try:
            self._file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise error(f"{path} is missing") from None
        except (SafetensorError, OSError) as cause:
            raise error(f"{path} is truncated, or not a safetensors file: {cause}") from cause
        self._names: frozenset[str] = frozenset(self._file.keys())

    def keys(self) -> frozenset[str]:
        """Names of the entries."""
        return self._names

    def metadata(self) -> dict[str, str]:
        """The header's free-form metadata."""
        return self._file.metadata() or {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an entry."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of an entry."""
        given = self._slice(name).get_dtype()
        if given not in DTYPES:
            raise self._error(f"{self.path}: {name} has the dtype {given}; known: {', '.join(DTYPES)}")
        return DTYPES[given]

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """An entry, or the part of it at `index` (slices of step 1), as a new tensor on the CPU."""
        tensor: Tensor = self._slice(name)[index or ()]
        return tensor

    def close(self) -> None:
        """Unmap the file."""
        self._file.__exit__(None, None, None)

    def _slice(self, name: str) -> Any:
        if name not in self._names:
            raise self._error(f"{self.path} has no entry {name!r}")
        return self._file.get_slice(name)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write `tensors`, on any device, to a new file, and wait until the disk has them.

    Tensors come to the CPU one by one. Wide dtypes come first, as in files of the safetensors library, so
    that every tensor is aligned.
    """
    return write_chunks(path, _chunks(tensors, metadata))


def _chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = DTYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
