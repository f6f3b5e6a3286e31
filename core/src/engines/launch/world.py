"""Ranks that another launcher, torchrun or a cluster's own, started."""

from __future__ import annotations

import os
import time
from typing import Final

from engines.launch.guards import die_with_parent
from engines.launch.job import Job, Rank, run_target
from engines.launch.stopping import StopRequest

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_SPEAKS_S: Final = 1.0


def foreign_world() -> tuple[int, int] | None:
    """(rank, number of ranks) if another launcher started this process as one of several, else None."""
    if not all(os.environ.get(name) for name in _VARIABLES):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_here(job: Job, rank: int) -> int:
    """Run the job as one of the ranks that a foreign launcher started; returns the exit code.

    What all ranks find wrong is said once: other ranks than the first hold their error back for a second, in
    which the launcher, seeing the first one end, ends them.
    """
    # torchrun starts workers from its main thread; of a cluster's own launcher nobody knows
    die_with_parent(os.getppid(), by_kernel="TORCHELASTIC_RUN_ID" in os.environ)
    stop = StopRequest.install()
    try:
        return run_target(job, Rank(rank, job.num_ranks, stop))
    except BaseException:
        stop.release()
        if rank != 0:
            time.sleep(_FIRST_SPEAKS_S)
        raise
