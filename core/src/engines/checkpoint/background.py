"""Saving while training goes on: from copies in host memory, by a thread."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from engines.agreement import Peers
from engines.checkpoint.host_copies import HostCopies
from engines.checkpoint.saving import Contents, Saving

log = logging.getLogger("engines")

_WORTH_SAYING_S = 0.1


class Saver:
    """The saves of one engine, never two at once. Every rank calls every method, in the same order."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._saving: Saving | None = None
        self._thread: threading.Thread
        self._error: BaseException | None = None

    @property
    def pending(self) -> Path | None:
        """The checkpoint that is still being written."""
        return self._saving.target if self._saving is not None else None

    def save(self, path: str | Path, contents: Contents, *, background: bool) -> None:
        """Save as `engines.checkpoint.save`; with `background` return as soon as everything is copied.

        If an earlier one is still being written, wait for it first, and say so. Raises `CheckpointError`, also for
        what went wrong with the earlier one.
        """
        if self._saving is not None:
            earlier, began = self._saving.target, time.monotonic()
            self.finish()
            waited = time.monotonic() - began
            if Peers.of().is_first and waited > _WORTH_SAYING_S:
                log.warning("%s waited %.1f s until %s was written", path, waited, earlier)
        if not background:
            saving = Saving(path, contents)
            saving.complete(saving.write)
            return
        self._saving = Saving(path, contents, copies=self._copies)
        self._error = None
        # Without `complete` its files are worth nothing, so a process that ends need not wait for it.
        self._thread = threading.Thread(target=self._write, args=(self._saving,), name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Complete what is being written if all ranks have written it. Quick; call it before each step.

        Raises `CheckpointError` on all ranks, with the cause, as soon as one of them has failed.
        """
        if self._saving is None:
            return
        ended = not self._thread.is_alive()
        states = Peers.of().all_gather((ended, ended and self._error is not None))
        if all(ended for ended, _ in states) or any(failed for _, failed in states):
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written, and complete it. Raises `CheckpointError` if it failed on any rank."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        saving.complete(self._outcome)

    def abandon(self) -> None:
        """Let go of what is being written, where an error ends the run and ranks can't be waited for."""
        self._saving = None

    def _write(self, saving: Saving) -> None:
        try:
            saving.write()
        except BaseException as error:  # noqa: BLE001 (raised by `finish`, in the thread that trains)
            self._error = error

    def _outcome(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
