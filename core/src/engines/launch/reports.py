"""What went wrong in which rank, and which of it came first."""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from engines.errors import EnginesError
from engines.launch.job import RunFailed

Kind = Literal["user", "stopped", "memory", "defect", "peer"]

_LOST_PEER = re.compile(
    r"gloo|nccl|hccl|connection (closed|reset|refused)|broken pipe|timed out waiting|socket timeout", re.IGNORECASE
)
_NO_MEMORY = re.compile(r"out of memory|can(no|')t allocate memory|bad_alloc", re.IGNORECASE)


def tells_no_memory(text: str) -> bool:
    """Whether a message, of Python, of torch on any device or of the system, says that memory ran out."""
    return _NO_MEMORY.search(text) is not None


@dataclass(frozen=True)
class Report:
    """An exception that ended a rank."""

    rank: int
    time: float
    kind: Kind
    """user: an `EnginesError`; stopped: a `RunFailed`; memory: none was left; peer: a collective failed, most likely
    because another rank did; defect: anything else."""
    message: str
    remedy: str | None
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Report:
        """The report of the rank that `error` ends; made as soon as it is caught."""
        kind = _kind(error)
        if kind == "memory":
            traceback.clear_frames(error.__traceback__)  # their tensors: a report needs memory too
        named = f"{type(error).__name__}: {error}".removesuffix(": ")
        return cls(
            rank=rank,
            time=time.time(),
            kind=kind,
            message=error.message if isinstance(error, EnginesError) else named,
            remedy=error.remedy if isinstance(error, EnginesError) else None,
            traceback="".join(traceback.format_exception(error)),
        )

    def write(self, file: Path) -> None:
        """Put it where the launcher looks, whole or not at all."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(file)

    @classmethod
    def read(cls, file: Path) -> Report | None:
        """The report, if the rank wrote one."""
        return cls(**json.loads(file.read_text())) if file.exists() else None


@dataclass(frozen=True)
class Death:
    """A rank that ended without a report: by a signal, or with an exit code of its own."""

    rank: int
    returncode: int

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"rank {self.rank} ended with exit code {self.returncode} and said nothing"
        name = signal.Signals(-self.returncode).name
        memory = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"rank {self.rank} was ended by {name}{memory}"


def first_cause(reports: Sequence[Report], deaths: Sequence[Death]) -> Report | Death:
    """What most likely caused the rest.

    The earliest exception that isn't about a lost peer; else a rank that died without one; else the earliest.
    """
    ordered = sorted(reports, key=lambda report: report.time)
    own = [report for report in ordered if report.kind != "peer"]
    candidates: list[Report | Death] = [*own, *deaths, *ordered]
    return candidates[0]


def _kind(error: BaseException) -> Kind:
    if isinstance(error, EnginesError):
        return "user"
    if isinstance(error, RunFailed):
        return "stopped"
    if isinstance(error, MemoryError) or tells_no_memory(str(error)):
        return "memory"
    modules: Mapping[type, str] = {kind: kind.__module__ for kind in type(error).__mro__}
    from_torch = any(name.startswith("torch") for name in modules.values()) or isinstance(error, RuntimeError)
    return "peer" if from_torch and _LOST_PEER.search(str(error)) else "defect"
