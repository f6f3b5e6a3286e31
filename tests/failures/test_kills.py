"""SIGKILL at random moments, many times over: `make kill-test N=50` for more. The first five are in test_runs.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.commands import recipe, run
from support.kills import STEPS_PER_KILL, Killer, kill_seed

KILLS = int(os.environ.get("KILLS") or 20)
"""Over both engines."""


@pytest.mark.more
@pytest.mark.timeout(300 + 120 * KILLS)
@pytest.mark.parametrize(
    ("strategy", "layout", "kills"),
    [("fsdp2", {}, KILLS - KILLS // 3), ("megatron", {"pipeline_parallel_size": 2}, KILLS // 3)],
    ids=["fsdp2", "megatron"],
)
def test_killed_again_and_again(work: Path, strategy: str, layout: dict[str, Any], kills: int) -> None:
    """Nothing complete is lost, nothing is done twice, nobody stays, and the end is the same to the bit."""
    out, other = work / "out", work / "killed"
    file = recipe(
        work,
        trainer={"steps": 2 + kills * STEPS_PER_KILL, "keep": 2},
        engine={"strategy": strategy, **layout},
        launch={"nproc": 2, "timeout_s": 100},
    )
    code, output = run(file)
    assert code == 0, output
    killer = Killer((file, f"trainer.output_dir={other}"), other, kill_seed())
    for _ in range(kills):
        killer.kill()
    code, output = run(file, f"trainer.output_dir={other}")
    assert code == 0, killer.say(output)
    killer.check_end(out)
