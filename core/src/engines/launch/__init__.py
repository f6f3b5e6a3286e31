"""Processes: starting the ranks of a run on this machine, or taking part in those that torchrun started.

The launcher imports no torch. Each rank runs `module:function(payload, rank)`; see `Job`.
"""

from __future__ import annotations

from engines.launch.job import Job, Rank, RunFailed
from engines.launch.launcher import launch
from engines.launch.world import foreign_world, run_here

__all__ = ["Job", "Rank", "RunFailed", "foreign_world", "launch", "run_here"]
