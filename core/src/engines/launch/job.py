"""What ranks run, and what each knows about itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from engines.launch.heartbeat import Heartbeat
from engines.launch.meeting import compare_in_group
from engines.launch.stopping import StopRequest
from engines.torch_extensions import check_torch


class RunFailed(RuntimeError):
    """A run that ends by itself and says why in its message; exit code 1, without a traceback."""


@dataclass(frozen=True)
class Job:
    """A function that every rank runs: `target` is its `module:function`, called with (payload, Rank)."""

    target: str
    payload: Mapping[str, Any]
    """JSON."""
    num_ranks: int
    timeout_s: float
    """A rank that shows no sign of life for so long ends the run."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment that the ranks need from their first instruction on, where the user didn't set it."""
    alike: Mapping[str, Any] = field(default_factory=dict)
    """JSON by name: what must be equal on all ranks, where another launcher started each with a job of its own."""

    def write(self, file: Path) -> None:
        """Where ranks read it."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Job:
        """What the launcher wrote."""
        return cls(**json.loads(file.read_text()))


@dataclass
class Rank:
    """This process among those of the run."""

    rank: int
    num_ranks: int
    stop: StopRequest
    heartbeat: Heartbeat | None = None
    """None under torchrun."""
    place: str = "starting"
    """What it is doing."""
    uncompared: Mapping[str, Any] = field(default_factory=dict)
    """The job's `alike`, where ranks couldn't compare it before they run; they do as soon as they have a group."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def meet(self) -> None:
        """Hold all ranks to one job, if nobody has. All call it, once there is a process group.

        Raises `ConfigError` on all ranks where one has another job.
        """
        if self.uncompared:
            compare_in_group(self.uncompared)

    def at(self, place: str) -> None:
        """Say what this rank is doing ("step 12"), for the report if the run hangs or fails."""
        self.place = place
        if self.heartbeat is not None:
            self.heartbeat.at(place)


def run_target(job: Job, rank: Rank) -> int:
    """Call the job's function; returns the exit code. It is the first to import torch."""
    check_torch()
    module, _, name = job.target.partition(":")
    function: Callable[[Mapping[str, Any], Rank], int] = getattr(import_module(module), name)
    return function(job.payload, rank)
