"""Ranks that another launcher, torchrun or a cluster's own, started."""

from __future__ import annotations

import time

from engines.launch.job import Job, Rank, run_target
from engines.launch.meeting import FIRST_SPEAKS_S, Meeting
from engines.launch.stopping import StopRequest


def run_here(job: Job, rank: int) -> int:
    """Run the job as one of the ranks that a foreign launcher started; returns the exit code.

    It begins when all ranks are ready. What all ranks find wrong is said once: other ranks than the first hold
    their error back for a second, in which the launcher, seeing the first one end, ends them.
    """
    meeting = Meeting(rank, job.num_ranks, job.timeout_s)
    meeting.agree()
    stop = StopRequest.install()
    try:
        return run_target(job, Rank(rank, job.num_ranks, stop))
    except BaseException:
        stop.release()
        if rank != 0:
            time.sleep(FIRST_SPEAKS_S)
        raise
