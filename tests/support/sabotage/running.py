"""The whole kit on engines that are registered, in two sessions of pytest side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.sabotage.recording import RECORDS
from support.sabotage.table import ROOM, Sabotage

SESSIONS = 2
FILE = f"""
from engines.testing import conformance

{{name}} = conformance({{name!r}}, setup="{ROOM}:register")
"""
"""What an author writes; for several engines in one file, which share worlds, models and plain runs."""


@dataclass(frozen=True)
class Outcome:
    """What became of the kit's tests on one engine."""

    tests: int
    failures: dict[str, str]
    """The end of what a clause said, by its name less `test_`; that of one of its tests, if several failed."""

    def __str__(self) -> str:
        return "\n".join(f"{clause}: {said}" for clause, said in self.failures.items()) or "nothing"


class Kits:
    """Sessions that hold engines to the kit, one engine after another; to be closed."""

    def __init__(self, sabotages: Sequence[Sabotage], folder: Path) -> None:
        self._records = folder / "records"
        self._records.mkdir()
        self._running = ExitStack()
        self._sessions: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        for number in range(SESSIONS):
            names = [one.name for one in sabotages[number::SESSIONS]]
            if names:
                session = self._start(folder / f"session-{number}", names)
                self._sessions |= dict.fromkeys(names, session)

    def _start(self, folder: Path, names: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        folder.mkdir()
        file, log = folder / "test_engines.py", folder / "log"
        file.write_text("".join(FILE.format(name=name) for name in names))
        settings = {"rootdir": folder, "confcutdir": folder, "basetemp": folder / "temporary"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "pytest", "-c/dev/null", "-q", "-pno:cacheprovider", *options]
        path = os.pathsep.join(sys.path)  # where tests/support is
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", RECORDS: str(self._records)}
        process = subprocess.Popen(
            [*command, "-psupport.sabotage.recording", str(file)],
            env=environment,
            stdout=self._running.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
        )
        self._running.callback(_end, process)
        return process, log

    def outcome_of(self, sabotage: Sabotage) -> Outcome:
        """Waits until its turn has come and gone."""
        record = self._records / sabotage.name
        process, log = self._sessions[sabotage.name]
        while not record.exists():
            assert process.poll() is None or record.exists(), f"the kit did not run:\n{log.read_text()[-3000:]}"
            time.sleep(0.1)
        return Outcome(**json.loads(record.read_text()))

    def close(self) -> None:
        """End the sessions, done or not."""
        self._running.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
