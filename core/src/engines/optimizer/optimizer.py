"""One optimizer step as every engine means it: norm, skip or clip, AdamW at the schedule's rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from engines.config import OptimizerConfig
from engines.contract import StepResult
from engines.optimizer.adamw import build_adamw
from engines.optimizer.clipping import clip_gradients, gradient_norm, not_finite
from engines.optimizer.schedule import Schedule

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's per-element state, each shaped and sharded like its parameter."""


class Optimizer:
    """AdamW, clipping and schedule over an engine's parameters."""

    def __init__(self, parameters: Mapping[str, Parameter], config: OptimizerConfig, total_steps: int | None) -> None:
        """`parameters`: those to train, by the names under which their state is saved.

        Raises `ConfigError` for a decaying schedule without `total_steps`.
        """
        self.schedule = Schedule(config, total_steps)
        self.parameters = dict(parameters)
        self._config = config
        self._adamw = build_adamw(self.parameters.values(), config)

    def step(self) -> StepResult:
        """Update the parameters, unless the gradient norm is not finite; then nothing changes, on any rank.

        The schedule stays where it is. Every rank must call it, since the norm is summed over them.
        """
        norm = gradient_norm(self.parameters.values())
        lr = self.schedule.lr
        if not math.isfinite(norm):
            return StepResult(norm, lr, skipped="non_finite", not_finite=not_finite(self.parameters))
        clip_gradients(self.parameters.values(), norm, self._config.clip_grad)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        return StepResult(norm, lr)

    def moments(self, name: str) -> dict[str, Tensor] | None:
        """AdamW's moments of a parameter, None before its first update; they share its sharding."""
        state = self._adamw.state.get(self.parameters[name])
        return {moment: state[moment] for moment in MOMENTS} if state else None

    def updates(self, name: str) -> int:
        """How many updates a parameter has seen, as AdamW's bias correction counts."""
        state = self._adamw.state.get(self.parameters[name])
        return int(state["step"]) if state else 0

    def create_moments(self, name: str, updates: int) -> dict[str, Tensor]:
        """Give a parameter the moments it has after `updates` updates, all of which the caller then fills."""
        parameter = self.parameters[name]
        step = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
        moments = {moment: torch.empty_like(parameter.detach()) for moment in MOMENTS}
        self._adamw.state[parameter] = {"step": step, **moments}
        return moments

    def forget(self) -> None:
        """Drop all moments, as before the first step."""
        self._adamw.state.clear()
