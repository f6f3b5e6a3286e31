"""An output folder belongs to one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from engines.errors import ConfigError

LOCK: Final = ".lock"
_HELD: Final = frozenset({errno.EACCES, errno.EAGAIN})
_NO_LOCKS: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What file systems answer that can't lock a folder."""


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder that exists for this process. Raises `ConfigError` if another one holds it, OSError if it can't.

    The folder itself is locked, for who deletes `.lock` must not let a second run in. Network file systems show that
    lock to this machine alone, so `.lock` is locked too, for the others.
    """
    in_use = ConfigError(f"trainer.output_dir: {folder} is in use by another run")
    with ExitStack() as held:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise in_use from None
            if error.errno not in _NO_LOCKS:
                raise
        try:
            held.enter_context(FileLock(folder / LOCK, timeout=0))
        except Timeout:
            raise in_use from None
        yield
