"""Whether files are as the manifest says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engines.checkpoint_folder.manifest import FileRecord, Manifest


def faults(
    folder: Path, manifest: Manifest, *, checksums: bool = True, files: Iterable[str] | None = None
) -> list[str]:
    """One line for each of `files` (None: all) that is not as it was written; without `checksums` by size."""
    names = manifest.files if files is None else files
    found = (fault(folder / name, manifest.files[name], checksum=checksums) for name in names)
    return [line for line in found if line is not None]


def fault(file: Path, record: FileRecord, *, checksum: bool) -> str | None:
    """What is wrong with a file, naming it; None if nothing is."""
    if not file.is_file():
        return f"{file} is missing"
    size = file.stat().st_size
    if size != record.size:
        return f"{file} has {size} bytes, {record.size} were written"
    if checksum and xxh3(file) != record.xxh3:
        return f"{file} has changed since it was written: its checksum is another"
    return None


def xxh3(file: Path) -> str:
    """xxh3_128 of a file's bytes, in hex: what `xxhsum -H2` prints."""
    import xxhash

    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
