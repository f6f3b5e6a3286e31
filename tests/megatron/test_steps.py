"""Gradients that add up, steps that are skipped or broken off, and the optimizer's settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.batch import Batch, TokenOutputs
from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.runs import OPTIMIZER as CLIPPED
from engines.testing.runs import assert_metrics_agree, assert_weights_agree, same_bits, train_with_worker
from engines.testing.samples import mini_batches
from engines.testing.world import World
from support.engine import Fail, share, train_step, weights
from support.megatron import LAYOUTS, settings
from support.megatron_engine import Chunks, megatron

Worlds = Callable[[int], World]
Deep = Callable[..., Path]

FIRST, SECOND, THIRD = mini_batches()
TWO_EACH = {"micro_batch_size": 2}


class Summed(SFTLoss):
    """Cross entropy over a constant, so that losses of batches add up."""

    def denominators(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"cross_entropy": torch.tensor(100.0)}


def accumulate(folder: Path, layout: str) -> tuple[Any, ...]:
    """Norm and weights after one step on three batches: in three passes, and in one."""
    with megatron(folder, layout, TWO_EACH) as engine, megatron(folder, layout, TWO_EACH) as whole:
        losses = [engine.forward_backward(share(engine, batch), Summed())["loss"] for batch in (FIRST, SECOND, THIRD)]
        loss = whole.forward_backward(share(whole, FIRST + SECOND + THIRD), Summed())["loss"]
        norms = engine.optimizer_step().grad_norm, whole.optimizer_step().grad_norm
        return (sum(losses), loss), norms, weights(engine), weights(whole)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_moe", "tp2 sp", marks=pytest.mark.more),
        ("llama_tied", "pp2"),
        ("llama_tied", "pp2 dp2 distributed"),
        pytest.param("qwen3", "cp2", marks=pytest.mark.more),
        pytest.param("llama_tied", "pp2 vpp2", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "ep2", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "tp2 cp2", marks=pytest.mark.more),
    ],
)
def test_gradients_of_passes_add_up(family: str, layout: str, world: Worlds, deep: Deep) -> None:
    for losses, norms, found, expected in world(LAYOUTS[layout].processes)(accumulate, deep(family), layout):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert norms[0] == pytest.approx(norms[1], rel=5e-6)
        assert_weights_agree(found, expected, 3e-5)


def drop_gradients(folder: Path, layout: str) -> None:
    with megatron(folder, layout) as engine, megatron(folder, layout) as fresh:
        results = []
        engine.forward_backward(share(engine, FIRST), SFTLoss())
        engine.zero_grad()
        for one in (engine, fresh):
            one.forward_backward(share(one, SECOND), SFTLoss())
            results.append((one.optimizer_step(), weights(one)))
        (step, after), (expected, weights_expected) = results
        assert step == expected and same_bits(after, weights_expected)


@pytest.mark.parametrize("layout", ["tp2 sp", pytest.param("pp2 dp2 distributed", marks=pytest.mark.more)])
def test_zero_grad(layout: str, world: Worlds, deep: Deep) -> None:
    world(LAYOUTS[layout].processes)(drop_gradients, deep("llama_tied"), layout)


class Broken(SFTLoss):
    """Fails at the second micro-batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("injected")
        return super().__call__(out, batch)


def break_off(folder: Path, layout: str, settings: dict[str, Any]) -> None:
    """On every rank of the world at once; ranks that wait for each other are the launcher's to end."""

    def steps(engine: Any) -> list[Any]:
        return [train_step(engine, SECOND), train_step(engine, THIRD)]

    how = {"micro_batch_size": 1, **settings}
    with megatron(folder, layout, how) as engine:
        train_step(engine, FIRST)
        expected, after = steps(engine), weights(engine)
    with megatron(folder, layout, how) as engine:
        train_step(engine, FIRST)
        batch = share(engine, FIRST)
        with pytest.raises(RuntimeError, match="injected"):
            engine.train_batch(batch, Broken())
        for late in (False, True):
            engine.wrap(fault := Fail(at=1, after=late))
            with pytest.raises(RuntimeError, match="injected"):
                engine.train_batch(batch, SFTLoss())
            engine.unwrap(fault)
        engine.wrap(fault := Fail(at=1, after=False))
        with pytest.raises(RuntimeError, match="injected"):
            engine.infer_batch(batch)
        engine.unwrap(fault)
        assert steps(engine) == expected and same_bits(weights(engine), after)


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", "dp2", {"distributed_optimizer": True}),
        pytest.param(
            *("qwen3_moe", "tp2 sp", {"moe_aux_loss_coefficient": 0.1, "activation_checkpointing": True}),
            marks=pytest.mark.more,
        ),
        pytest.param("qwen3_moe", "ep2", {}, marks=pytest.mark.more),
        pytest.param("qwen3", "cp2", {}, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_a_broken_step_leaves_nothing_behind(
    family: str, layout: str, settings: dict[str, Any], world: Worlds, deep: Deep
) -> None:
    world(LAYOUTS[layout].processes)(break_off, deep(family), layout, settings)


def poison_one_rank(folder: Path, layout: str, name: str, value: float) -> None:
    """A gradient that the last rank alone holds is not finite, as after a fault of its memory."""
    with megatron(folder, layout, wrappers=[chunks := Chunks()]) as engine, megatron(folder, layout) as clean:
        for one in (engine, clean):
            train_step(one, FIRST)
        before, lr = weights(engine), engine.lr
        engine.forward_backward(share(engine, SECOND), SFTLoss())
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            own = [parameter for full_name, parameter in chunks.parameters() if name in full_name]
            own[-1].main_grad.view(-1)[0] = value
        step = engine.optimizer_step()
        assert step.skipped == "non_finite" and not math.isfinite(step.grad_norm)
        [blamed] = step.not_finite
        assert blamed == "lm_head.weight" or ".experts." in blamed, "the one parameter, on every rank"
        assert step.lr == lr == engine.lr
        assert same_bits(weights(engine), before)
        engine.zero_grad()
        assert train_step(engine, THIRD) == train_step(clean, THIRD)
        assert same_bits(weights(engine), weights(clean))


@pytest.mark.parametrize(
    ("family", "layout", "name"),
    [("llama", "tp2", "output_layer"), ("llama", "pp2", "output_layer"), ("qwen3_moe", "ep2", ".experts.")],
)
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.more)])
def test_one_rank_that_is_not_finite_skips_for_all(
    family: str, layout: str, name: str, value: float, world: Worlds, deep: Deep
) -> None:
    world(2)(poison_one_rank, deep(family), layout, name, value)


SETTINGS = {
    "linear": {
        "schedule": "linear",
        "warmup_steps": 1,
        "clip_grad": None,
        "weight_decay": 0.1,
        "betas": (0.8, 0.95),
    },
    "cosine": {"schedule": "cosine", "clip_grad": 0.05, "weight_decay": 0.5, "betas": (0.5, 0.9), "lr": 3e-3},
}


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        ("linear", "qwen3", "tp2 sp"),
        ("cosine", "llama_tied", "pp2 dp2 distributed"),
        pytest.param("cosine", "qwen3_moe", "tp2 sp", marks=pytest.mark.more),
        pytest.param("linear", "qwen3_moe", "pp2 ep2", marks=pytest.mark.more),
    ],
)
def test_settings_of_the_optimizer(name: str, family: str, layout: str, world: Worlds, deep: Deep) -> None:
    optimizer = {**CLIPPED, **SETTINGS[name]}
    run = world(LAYOUTS[layout].processes)
    runs = run(train_with_worker, deep(family), mini_batches(), settings(layout), optimizer)
    expected = plain.train(deep(family), mini_batches(), **optimizer)
    assert_metrics_agree(runs, expected, 5e-6)
    assert_weights_agree(runs[0].weights, expected.weights, 3e-5)


def watch_forwards(folder: Path, layout: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    with megatron(folder, layout, TWO_EACH, wrappers=[chunks := Chunks()]) as engine:
        train_step(engine, FIRST)
        trained, chunks.forwards = chunks.forwards, []
        engine.infer_batch(share(engine, FIRST))
        return trained, chunks.forwards


def test_wrappers_see_every_chunk_and_micro_batch_once(world: Worlds, deep: Deep) -> None:
    for trained, inferred in world(2)(watch_forwards, deep("llama"), "pp2 vpp2"):
        expected = [(chunk, index) for chunk in range(2) for index in range(4)]
        assert sorted(trained) == sorted(inferred) == expected
