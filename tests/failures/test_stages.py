"""An exception on one pipeline stage, while the others wait for what it would have sent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"
ENDS_WITHIN_S = 10


@pytest.mark.more
def test_a_stage_that_raises_in_mid_schedule_ends_all(work: Path) -> None:
    """Promptly, and its own error is the one that is said."""
    stage = 0
    (work / "stage").write_text(str(stage))
    done = subprocess.run(
        [sys.executable, SUPPORT / "run_job.py", "support.failing_stage:run", "2", "100", work],
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    elapsed = time.time() - float((work / "raised").read_text())
    assert done.returncode == 1
    assert f"Error: rank {stage} failed: KeyError: 'planted in the schedule'\nTraceback" in done.stderr
    assert done.stderr.count("Error: rank") == 1, "nothing of the stage that lost it"
    assert "failing_stage.py" in done.stderr, "where it was raised"
    assert elapsed < ENDS_WITHIN_S
