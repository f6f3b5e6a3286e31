"""Files and folders that are either complete under their name or not there, also after a crash."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from engines.errors import NO_URLS, EnginesError
from engines.paths import LONGEST_NAME, why_no_path

_LARGE = 2**20
"""Bytes of a chunk that is worth a second thread."""

Purpose = Literal["tmp", "replaced", "removed"]
TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<purpose>tmp|replaced|removed)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Written:
    """What is known of a file that was just written."""

    size: int
    """Bytes."""
    xxh3: str
    """xxh3_128 of all bytes, in hex: what `xxhsum -H2` prints."""


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file and wait until the disk has it; the checksum is taken of the bytes on their way.

    Raises OSError, which names the file.
    """
    digest = xxhash.xxh3_128()
    size = 0
    # A second thread takes the checksum of a large chunk while it is written; both leave the interpreter to others.
    with naming(path), path.open("xb") as file, ThreadPoolExecutor(1) as hashing:
        for chunk in chunks:
            if len(chunk) < _LARGE:
                digest.update(chunk)
                size += file.write(chunk)
                continue
            hashed = hashing.submit(digest.update, chunk)
            size += file.write(chunk)
            hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an OSError name `path`, where the system, which was asked by descriptor, names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def local_folder(path: str | Path, *, error: type[EnginesError]) -> Path:
    """`path`, unless it is a URL, which is refused rather than made into a folder of that name, or can't be one."""
    if "://" in str(path):
        raise error(f"{path} is a URL; only folders of a (shared) file system can be written and read", NO_URLS)
    if fault := why_no_path(os.fspath(path)):
        raise error(f"{str(path)[:LONGEST_NAME]!r}: {fault}")
    return Path(path)


def temporary_name(target: Path, purpose: Purpose = "tmp") -> Path:
    """A free dot-name beside `target`, so that a rename stays on one file system.

    `tmp`: being written; `replaced`: the earlier `target`, about to be deleted; `removed`: being deleted.
    """
    return target.with_name(f".{target.name}.{purpose}-{secrets.token_hex(4)}")


def publish(temporary: Path, target: Path) -> None:
    """Give a finished folder its name; an earlier folder of that name is moved aside first and then deleted.

    The files in `temporary` must be on the disk already. Raises OSError, and then `target` is what it was.
    """
    sync_folder(temporary)
    replaced = temporary_name(target, "replaced") if target.exists() else None
    if replaced:
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced:
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)  # what remains bears a dot-name and is cleaned up later


@dataclass(frozen=True)
class Leftover:
    """What an interrupted `publish` or `remove` left under a temporary name."""

    path: Path
    target: Path
    """Whose name it would have got, or had."""
    purpose: str


def leftovers(folder: Path) -> list[Leftover]:
    """Those in `folder`; one of them may be in use where another process writes."""
    return [
        Leftover(path, folder / match["name"], match["purpose"])
        for path in sorted(folder.iterdir())
        if (match := TEMPORARY.fullmatch(path.name))
    ]


def remove(folder: Path) -> None:
    """Delete a folder; what a crash leaves of it no longer bears its name."""
    removed = temporary_name(folder, "removed")
    folder.rename(removed)
    delete(removed)


def delete(folder: Path) -> None:
    """Delete a folder, or a link to one: what it leads to somebody put elsewhere."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
