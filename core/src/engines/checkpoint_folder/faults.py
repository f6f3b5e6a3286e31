"""Whether files are as the manifest says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.checkpoint_folder.manifest import FileRecord, Manifest

_AT_ONCE = 2
"""Files that are read at a time."""
_BUFFER = 2**20
"""Bytes: as many as stay in a processor's cache."""


def faults(
    folder: Path, manifest: Manifest, *, checksums: bool = True, files: Iterable[str] | None = None
) -> list[str]:
    """One line for each of `files` (None: all) that is not as it was written; without `checksums` by size."""
    names = list(manifest.files if files is None else files)

    def look(name: str) -> str | None:
        return fault(folder / name, manifest.files[name], checksum=checksums)

    # Reading and hashing leave the interpreter to others, so that one file is hashed while another is read.
    with ThreadPoolExecutor(_AT_ONCE if checksums else 1) as threads:
        return [line for line in threads.map(look, names) if line is not None]


def quick_faults(folder: Path, manifest: Manifest) -> list[str]:
    """One line for each file that is not as it was written: tensors by size, all else by checksum."""
    tensors = {name for name in manifest.files if name.endswith(".safetensors")}
    rest = [name for name in manifest.files if name not in tensors]
    return [*faults(folder, manifest, files=rest), *faults(folder, manifest, checksums=False, files=tensors)]


def fault(file: Path, record: FileRecord, *, checksum: bool) -> str | None:
    """What is wrong with a file, naming it; None if nothing is."""
    try:
        if not file.is_file():
            return f"{file} is missing"
        size = file.stat().st_size
        if size != record.size:
            return f"{file} has {size} bytes, {record.size} were written"
        if checksum and xxh3(file) != record.xxh3:
            return f"{file} has changed since it was written: its checksum is another"
    except OSError as error:
        return f"{file} can't be read: {error.strerror}"
    return None


def xxh3(file: Path) -> str:
    """xxh3_128 of a file's bytes, in hex: what `xxhsum -H2` prints."""
    import xxhash

    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BUFFER))
    with file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while length := opened.readinto(buffer):
            digest.update(buffer[:length])
    return str(digest.hexdigest())
