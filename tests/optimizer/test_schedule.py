"""Learning rates against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from engines.config import OptimizerConfig
from engines.errors import ConfigError
from engines.optimizer import Schedule


def rates(config: OptimizerConfig, total_steps: int | None, steps: int) -> list[float]:
    schedule = Schedule(config, total_steps)
    used = []
    for _ in range(steps):
        used.append(schedule.lr)
        schedule.step()
    return used


def test_constant_needs_no_length() -> None:
    assert rates(OptimizerConfig(lr=0.5), None, 3) == [0.5, 0.5, 0.5]


def test_warmup_reaches_the_peak_at_its_last_step() -> None:
    assert rates(OptimizerConfig(lr=1.0, warmup_steps=4), None, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_peak_to_zero_at_the_last_step() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear")
    assert rates(config, 6, 7) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_linear_without_warmup_falls_from_the_first_step_on() -> None:
    assert rates(OptimizerConfig(lr=1.0, schedule="linear"), 4, 4) == [0.75, 0.5, 0.25, 0.0]


def test_cosine_is_at_half_in_the_middle() -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=1, schedule="cosine")
    expected = [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]
    assert rates(config, 5, 5) == pytest.approx(expected, abs=1e-15)


def test_a_run_that_ends_within_its_warmup_never_decays() -> None:
    assert rates(OptimizerConfig(lr=1.0, warmup_steps=4, schedule="cosine"), 2, 2) == [0.25, 0.5]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_without_an_end_is_refused(schedule: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.schedule: '{schedule}'"):
        Schedule(OptimizerConfig(schedule=schedule), None)


def test_state_restores_the_position_and_nothing_else() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear")
    schedule = Schedule(config, 10)
    schedule.step()
    schedule.step()
    longer = Schedule(config, 20)
    longer.load_state(schedule.state())
    assert longer.lr == pytest.approx(1 - 3 / 20)


def test_step_returns_the_rate_of_the_next() -> None:
    schedule = Schedule(OptimizerConfig(lr=1.0, warmup_steps=2), None)
    assert [schedule.step(), schedule.step()] == [1.0, 1.0]
