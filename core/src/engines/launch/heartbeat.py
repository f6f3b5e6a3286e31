"""Signs of life: a thread of each rank touches a file, the launcher watches."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

INTERVAL_S: Final = 0.5


class Heartbeat:
    """Writes this rank's whereabouts to `file` twice a second, from a daemon thread.

    A process that is stopped, or stuck while it holds the interpreter, falls silent.
    """

    def __init__(self, file: Path) -> None:
        self._place = "starting"
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def at(self, place: str) -> None:
        """Say what the rank is doing."""
        self._place = place
        self._write()

    def _beat(self) -> None:
        while True:
            self._write()
            time.sleep(INTERVAL_S)

    def _write(self) -> None:
        os.pwrite(self._descriptor, f"{self._place[:60]:<60}".encode(), 0)


class Watch:
    """The launcher's view of one rank's heartbeat.

    Silence is counted on the monotonic clock from when the launcher last *saw* the file change, so that a
    machine that slept is no reason to end a run.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp = 0
        self._seen = time.monotonic()

    def silent_s(self) -> float:
        """Seconds without a sign of life, as far as the launcher looked; call it often."""
        stamp = self._file.stat().st_mtime_ns if self._file.exists() else 0
        now = time.monotonic()
        if stamp != self._stamp:
            self._stamp, self._seen = stamp, now
        return now - self._seen

    def place(self) -> str:
        """What the rank last said that it was doing."""
        return self._file.read_text().strip() if self._file.exists() else "starting"
