"""One safetensors file: sliced reading, and writing with a checksum on the way."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from math import prod
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

META = "__metadata__"
"""What the header has beside entries."""
_WORTH_A_THREAD = 4 * 2**20
"""Bytes whose second half a second thread reads."""

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
        """An entry, or the part of it at `index` (slices of step 1), on the CPU; it may share the file's mapping."""
        tensor: Tensor = self._slice(name)[index or ()]
        return tensor

    def read_into(self, target: Tensor, name: str, index: Index | None = None) -> None:
        """Fill `target`, on any device and of any dtype, with what `read` gives; its shape must be that.

        Whole rows of the entry's own dtype go straight into memory of the CPU.
        """
        rows = self._rows(name, index)
        straight = target.device.type == "cpu" and target.is_contiguous() and target.dtype == self.dtype(name)
        if rows is None or not straight:
            target.copy_(self.read(name, index))
        elif target.numel():
            assert target.numel() == rows.stop - rows.start, f"{name}: {tuple(target.shape)} has no room for {index}"
            memory = target.detach().reshape(-1).view(torch.uint8).numpy().data
            self._bytes.read_into(memory, name, rows.start * target.itemsize)

    def close(self) -> None:
        """Unmap the file."""
        self._file.__exit__(None, None, None)
        if "_bytes" in self.__dict__:
            self._bytes.close()

    def _rows(self, name: str, index: Index | None) -> range | None:
        """Which elements of an entry `index` means, if they lie one after another."""
        shape = self.shape(name)
        if any(part.indices(size) != (0, size, 1) for part, size in zip((index or ())[1:], shape[1:], strict=False)):
            return None
        first, last, _ = index[0].indices(shape[0]) if index else (0, shape[0] if shape else 1, 1)
        row = prod(shape[1:])
        return range(first * row, last * row)

    @cached_property
    def _bytes(self) -> _EntryBytes:
        return _EntryBytes(self.path, self._error)

    def _slice(self, name: str) -> Any:
        if name not in self._names:
            raise self._error(f"{self.path} has no entry {name!r}")
        return self._file.get_slice(name)


class _EntryBytes:
    """The entries of a file that is known to be sound, as bytes that are read rather than mapped."""

    def __init__(self, path: Path, error: type[EnginesError]) -> None:
        self._file = path.open("rb", buffering=0)
        self._error = error
        self._threads = ThreadPoolExecutor(1)
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        self._starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != META}

    def read_into(self, memory: memoryview, name: str, offset: int) -> None:
        """Fill `memory` with an entry's bytes from `offset` on."""
        at = self._starts[name] + offset
        if len(memory) < _WORTH_A_THREAD:
            self._read(memory, at)
            return
        half = len(memory) // 2
        rest = self._threads.submit(self._read, memory[half:], at + half)
        self._read(memory[:half], at)
        rest.result()

    def close(self) -> None:
        """Close the file."""
        self._threads.shutdown()
        self._file.close()

    def _read(self, memory: memoryview, at: int) -> None:
        while len(memory):
            length = os.preadv(self._file.fileno(), [memory], at)
            if not length:
                raise self._error(f"{self._file.name} is truncated: it became shorter while it was read")
            memory, at = memory[length:], at + length


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
    header: dict[str, Any] = {META: dict(metadata)} if metadata else {}
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
