"""Norm, clipping, AdamW and skips on plain tensors, against torch's own functions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from engines.config import OptimizerConfig
from engines.optimizer import Optimizer, clip_gradients, gradient_norm

SHAPES = {"weight": (64, 33), "row": (1, 5), "bias": (7,), "scalar": ()}


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def set_gradients(parameters: dict[str, Parameter], seed: int, scale: float = 5.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def difference(a: dict[str, Parameter], b: dict[str, Parameter]) -> float:
    return max(float((a[name].detach().double() - b[name].detach().double()).abs().max()) for name in a)


def test_norm_counts_every_element_once() -> None:
    parameters = make_parameters()
    set_gradients(parameters, 1)
    elements = torch.cat([p.grad.double().flatten() for p in parameters.values()])
    assert gradient_norm(parameters.values()) == pytest.approx(float(elements.norm()), rel=1e-7)


def test_norm_of_many_tiny_and_one_large_gradient_loses_nothing() -> None:
    parameters = [Parameter(torch.zeros(1)) for _ in range(20001)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 1e-4)
    parameters[0].grad = torch.ones(1)
    assert gradient_norm(parameters) == pytest.approx(math.sqrt(1 + 20000 * 1e-8), rel=1e-9)


def test_parameters_without_gradients_count_as_zero() -> None:
    parameters = make_parameters()
    assert gradient_norm(parameters.values()) == 0.0
    parameters["bias"].grad = torch.full((7,), 2.0)
    assert gradient_norm(parameters.values()) == pytest.approx(math.sqrt(28))


@pytest.mark.parametrize(("clip_grad", "factor"), [(None, 1.0), (20.0, 1.0), (1.0, 1 / (10 + 1e-6))])
def test_clipping_factor(clip_grad: float | None, factor: float) -> None:
    parameter = Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 5.0)
    clip_gradients([parameter], 10.0, clip_grad)
    assert torch.allclose(parameter.grad, torch.full((4,), 5.0 * factor), rtol=1e-7)


@pytest.mark.parametrize("clip_grad", [1.0, None])
def test_steps_equal_adamw_in_float64(clip_grad: float | None) -> None:
    config = OptimizerConfig(
        lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1, clip_grad=clip_grad, warmup_steps=2
    )
    ours, reference = make_parameters(), make_parameters(torch.float64)
    optimizer = Optimizer(ours, config, None)
    adamw = torch.optim.AdamW(reference.values(), lr=1.0, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)
    for step, lr in enumerate([0.005, 0.01, 0.01], start=1):
        set_gradients(ours, step)
        set_gradients(reference, step)
        norm = torch.nn.utils.clip_grad_norm_(reference.values(), clip_grad or math.inf)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        result = optimizer.step()
        optimizer.schedule.step()
        assert result.lr == pytest.approx(lr)
        assert result.grad_norm == pytest.approx(float(norm), rel=2e-7)
    assert difference(ours, reference) < 1e-6


def test_weight_decay_is_off_unless_asked_for() -> None:
    parameters = {"weight": Parameter(torch.ones(3))}
    parameters["weight"].grad = torch.zeros(3)
    Optimizer(parameters, OptimizerConfig(lr=0.1), None).step()
    assert torch.equal(parameters["weight"], torch.ones(3))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_step_changes_nothing(poison: float) -> None:
    parameters = make_parameters()
    optimizer = Optimizer(parameters, OptimizerConfig(lr=1e-2), None)
    set_gradients(parameters, 1)
    optimizer.step()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    moments = {name: optimizer.moments(name)["exp_avg"].clone() for name in parameters}
    set_gradients(parameters, 2)
    parameters["bias"].grad[3] = poison
    result = optimizer.step()
    assert result.skipped == "non_finite"
    assert not math.isfinite(result.grad_norm)
    assert difference(parameters, before) == 0.0
    assert all(torch.equal(moments[name], optimizer.moments(name)["exp_avg"]) for name in parameters)
    assert all(optimizer.updates(name) == 1 for name in parameters)


def test_state_appears_with_the_first_update_and_can_be_made_by_hand() -> None:
    parameters = make_parameters()
    optimizer = Optimizer(parameters, OptimizerConfig(lr=1e-2), None)
    assert optimizer.moments("weight") is None
    assert optimizer.updates("weight") == 0
    for step in (1, 2):
        set_gradients(parameters, step)
        optimizer.step()
    copies = {name: Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    resumed = Optimizer(copies, OptimizerConfig(lr=1e-2), None)
    for name in copies:
        for moment, value in resumed.create_moments(name, optimizer.updates(name)).items():
            value.copy_(optimizer.moments(name)[moment])
    for either in (optimizer, resumed):
        set_gradients(either.parameters, 3)
        either.step()
    assert difference(parameters, copies) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_of_a_large_matrix_is_exact(dtype: torch.dtype) -> None:
    """One float32 sum over as many elements is off by 1e-5."""
    parameter = Parameter(torch.zeros(1000, 1001, dtype=dtype))
    parameter.grad = (torch.randn(1000, 1001, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)
    assert gradient_norm([parameter]) == pytest.approx(float(parameter.grad.double().norm()), rel=1e-7)
