"""Megatron's optimizers as every engine means a step: norm, skip or clip, AdamW at the schedule's rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from engines.config import OptimizerConfig
from engines.contract import StepResult
from engines.optimizer import Schedule, sum_of_squares, sum_over_ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's per-element state."""


@dataclass(frozen=True)
class ParameterState:
    """What this rank's optimizer holds of one parameter of the model."""

    parameter: Parameter
    start: int
    stop: int
    """Flat range of the parameter that the rest covers: all of it, or a slice under the distributed optimizer."""
    main: Tensor
    """float32, of that range: the master under bfloat16, else memory of the parameter itself."""
    moments: dict[str, Tensor]
    """Of that range; empty before the first update."""
    step: int
    """Updates so far."""


@dataclass(frozen=True)
class _Place:
    """Where a parameter's state lies."""

    inner: Any
    """torch's optimizer, or another's."""
    group: dict[str, Any]
    """The parameter group of it."""
    main: Tensor
    start: int
    stop: int

    @property
    def counts(self) -> dict[str, Any]:
        """What holds `step`: torch's AdamW counts by parameter, TransformerEngine's and MindSpeed's by group."""
        return self.inner.state[self.main] if isinstance(self.inner, torch.optim.Adam) else self.group


class Optimizer:
    """AdamW, clipping and schedule over the parameters of this rank's chunks.

    Dense and expert parameters have optimizers of their own, since different ranks hold the same of them.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        total_steps: int | None,
        *,
        distributed: bool,
        dtype: torch.dtype,
    ) -> None:
        """All ranks call it. Raises `ConfigError` for a decaying schedule without `total_steps`."""
        self.schedule = Schedule(config, total_steps)
        self.distributed = distributed
        self._config = config
        made = get_megatron_optimizer(
            _megatron_config(config, distributed, dtype),
            list(chunks),
            config_overrides={},  # its default sets biases and norms apart, to be spared weight decay
            use_gloo_process_groups=False,
        )
        self._parts = getattr(made, "chained_optimizers", [made])
        self._places = {parameter: place for part in self._parts for parameter, place in _places(part)}

    @torch.no_grad()
    def step(self) -> StepResult:
        """Update the parameters, unless the gradient norm is not finite; then nothing changes, on any rank."""
        for part in self._parts:
            part.prepare_grads()
        norm, lr = self._norm(), self.schedule.lr
        if not math.isfinite(norm):
            return StepResult(norm, lr, skipped="non_finite")
        self._clip(norm)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step_with_ready_grads()
        return StepResult(norm, lr)

    def zero_grad(self) -> None:
        """Drop the references that `step` made to gradients."""
        for part in self._parts:
            part.zero_grad()

    def states(self) -> Iterator[ParameterState]:
        """What is held of each parameter; under the distributed optimizer some are absent, and ranges are parts."""
        for parameter, place in self._places.items():
            yield self._state(parameter, place)

    def create_moments(self, parameter: Parameter, step: int) -> ParameterState:
        """Give a parameter fresh zero moments after `step` updates, to be filled from a checkpoint."""
        place = self._places[parameter]
        state = place.inner.state[place.main]
        for name in MOMENTS:
            state[name] = torch.zeros_like(place.main.detach())
        counted_by_group = place.counts is place.group
        place.counts["step"] = step if counted_by_group else torch.tensor(float(step), dtype=torch.float32)
        return self._state(parameter, place)

    def forget(self) -> None:
        """Drop all moments, as before the first step."""
        for place in self._places.values():
            place.inner.state.pop(place.main, None)
            place.group.pop("step", None)

    def _state(self, parameter: Parameter, place: _Place) -> ParameterState:
        state = place.inner.state.get(place.main) or {}
        moments = {name: state[name] for name in MOMENTS if name in state}
        step = int(place.counts.get("step", 0)) if moments else 0
        return ParameterState(parameter, place.start, place.stop, place.main.detach(), moments, step)

    def _norm(self) -> float:
        """Over all parameters, each once; every part sums over the ranks that hold different gradients of it."""
        total = torch.zeros((), dtype=torch.float64)
        for part in self._parts:
            gradients = part.get_main_grads_for_grad_norm()
            squares = torch.zeros((), dtype=torch.float64, device=_device(part))
            if gradients:
                squares += sum_of_squares(gradients)
            total += sum_over_ranks(squares, part.get_grad_stats_parallel_group()).cpu()
        return float(total.sqrt())

    def _clip(self, norm: float) -> None:
        if self._config.clip_grad is None:
            return
        factor = min(1.0, self._config.clip_grad / (norm + 1e-6))
        gradients = [p.grad for part in self._parts for p in part.get_parameters() if p.grad is not None]
        if factor < 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)


def _megatron_config(config: OptimizerConfig, distributed: bool, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Clipping stays off: it is done here, by a norm that is exact to about 1e-7 on every device."""
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )


def _places(part: Any) -> Iterator[tuple[Parameter, _Place]]:
    if part.is_stub_optimizer:
        return
    inner = part.optimizer
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            span = part._get_model_param_range_map(parameter)["param"]
            held = inner.param_groups[group]
            yield parameter, _Place(inner, held, held["params"][order], span.start, span.end)
    elif hasattr(part, "float16_groups"):
        groups = zip(inner.param_groups, part.float16_groups, part.fp32_from_float16_groups, strict=True)
        for group, models, mains in groups:
            for parameter, main in zip(models, mains, strict=True):
                yield parameter, _Place(inner, group, main, 0, parameter.numel())
    else:
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter, _Place(inner, group, parameter, 0, parameter.numel())


def _device(part: Any) -> torch.device:
    parameters = part.get_parameters()
    if parameters:
        device: torch.device = parameters[0].device
        return device
    return part.get_loss_scale().device  # type: ignore[no-any-return]  # a rank without such parameters
