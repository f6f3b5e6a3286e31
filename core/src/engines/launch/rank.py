"""One rank of a run: `python -m engines.launch.rank FOLDER RANK PARENT`, started by the launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engines.launch.exchange import Exchange
from engines.launch.guards import die_with_parent
from engines.launch.heartbeat import Heartbeat
from engines.launch.job import Job, Rank, run_target
from engines.launch.reports import Report
from engines.launch.stopping import StopRequest


def main() -> None:
    """Run the job; whatever ends it is reported first, and then the process is gone at once."""
    exchange, number, parent = Exchange(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    stop = StopRequest.install()
    try:
        job = Job.read(exchange.job)
        rank = Rank(number, job.num_ranks, stop, Heartbeat(exchange.heartbeat(number)))
        code = run_target(job, rank)
    except BaseException as error:  # noqa: BLE001 (the report carries it to the launcher)
        Report.of(error, number).write(exchange.report(number))
        _leave(1)
    sys.exit(code)


def _leave(code: int) -> None:
    """End without the interpreter's shutdown, which may wait for peers that wait for us."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
