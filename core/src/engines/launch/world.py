"""Ranks that another launcher, torchrun or a cluster's own, started."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

from engines.launch.failure import say_report
from engines.launch.guards import die_with_parent
from engines.launch.job import Job, Rank, run_target
from engines.launch.meeting import FIRST_SPEAKS_S, Meeting, has_meeting_place
from engines.launch.reports import Report
from engines.launch.stopping import StopRequest

_CAUSE_SPEAKS_S: Final = 5.0
"""A process that fails loses its connections some time before it is gone."""


def run_here(job: Job, rank: int) -> int:
    """Run the job as one of the ranks that a foreign launcher started; returns the exit code.

    It begins when all ranks are ready for the same job; where the launcher keeps no store for them to meet in, the
    job's function must call `Rank.meet`. What all ranks find wrong is said once, and so is what one rank does to the
    others: others than the first hold their error back for a second, those that lost one for longer, in which the
    launcher, seeing one end, ends them. Raises `EnginesError` where that is what ended this rank; anything else is
    described on standard error.
    """
    uncompared: Mapping[str, Any] = {}
    if has_meeting_place():
        meeting = Meeting(rank, job.num_ranks, job.timeout_s)
        meeting.agree(job.alike)
    else:
        die_with_parent(os.getppid(), by_kernel=False)  # of a cluster's own launcher nobody knows
        uncompared = job.alike
    me = Rank(rank, job.num_ranks, StopRequest.install(), uncompared=uncompared)
    try:
        return run_target(job, me)
    except Exception as error:
        me.stop.release()
        report = Report.of(error, rank)
        if report.kind == "peer":
            time.sleep(_CAUSE_SPEAKS_S)
        elif not me.is_first:
            time.sleep(FIRST_SPEAKS_S)
        if report.kind == "user":
            raise
        say_report(report, me.place)
        return 1
