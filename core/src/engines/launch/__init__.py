"""Processes: starting the ranks of a run on this machine, or taking part in those that torchrun started.

The launcher imports no torch. Each rank runs `module:function(payload, rank)`; see `Job`.
"""

from __future__ import annotations

from engines.launch.job import Job, Rank, RunFailed
from engines.launch.launcher import launch
from engines.launch.meeting import foreign_world, refusals_heard_by_all
from engines.launch.world import run_here

__all__ = ["Job", "Rank", "RunFailed", "foreign_world", "launch", "refusals_heard_by_all", "run_here"]
