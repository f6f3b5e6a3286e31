"""Learning-rate schedules: a warm-up, then constant, or linear or cosine decay to 0."""

from __future__ import annotations

import math

from engines.config import OptimizerConfig
from engines.errors import ConfigError


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """The rate of optimizer step `step`, counted from 1.

    lr * step / warmup_steps while step <= warmup_steps; afterwards constant, or falling from lr at the end of
    the warm-up to 0 at `total_steps`, and 0 from there on.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    assert total_steps is not None
    if step >= total_steps:
        return 0.0
    progress = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * (1 + math.cos(math.pi * progress)) / 2


class Schedule:
    """Where a run stands on its schedule; it moves only by `step`, so skipped updates don't advance it."""

    def __init__(self, config: OptimizerConfig, total_steps: int | None) -> None:
        """Raises `ConfigError` where the schedule decays and nobody says when it ends."""
        if config.schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"optimizer.schedule: {config.schedule!r} decays to 0 at the last step, whose number is unknown",
                "give the total number of steps, or use 'constant'",
            )
        self._config = config
        self._total_steps = total_steps
        self.steps_done = 0
        """Optimizer steps that counted; the next one is `steps_done + 1`."""

    @property
    def lr(self) -> float:
        """The rate of the next optimizer step."""
        return learning_rate(self._config, self.steps_done + 1, self._total_steps)

    def step(self) -> float:
        """Count one optimizer step; return the rate of the next."""
        self.steps_done += 1
        return self.lr

    def state(self) -> dict[str, int]:
        """What a checkpoint must keep: JSON."""
        return {"steps_done": self.steps_done}

    def load_state(self, state: dict[str, int]) -> None:
        """Stand where `state` stood; rates follow from this run's own config and length."""
        self.steps_done = state["steps_done"]
