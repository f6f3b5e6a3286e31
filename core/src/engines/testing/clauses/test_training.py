"""Training gives the numbers of plain transformers and PyTorch, whatever the layout and the micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engines.batch import Batch, TokenOutputs
from engines.testing import plain
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks, PlainRun
from engines.testing.layouts import SINGLE, Layout
from engines.testing.numbers import assert_near
from engines.testing.plain import Sample
from engines.testing.runs import OPTIMIZER, assert_metrics_agree, assert_weights_agree, pack, train_with_worker
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

METRICS, WEIGHTS = 5e-6, 3e-5
"""Largest relative difference of loss and gradient norm, and of weights after three steps; sound engines are below a
tenth of it."""


@clause("numbers.md#how-equal")
def test_training_equals_plain_pytorch(
    subject: Subject, layout: Layout, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """At every layout, loss, gradient norm and updated weights are those of a process that runs each sample by
    itself: the gradient of a parameter is the plain sum of d(loss term / denominator) over all micro-batches,
    data-parallel ranks and token shards.
    """
    family = subject.family_at(layout)
    runs = on_ranks(layout, train_with_worker, model(family), mini_batches(), subject.settings(layout))
    expected = plain_run(family)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


@clause("numbers.md#how-equal")
def test_every_model_trains_alike(
    any_model: str, subject: Subject, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """A model that the engine's `EngineConfig.check` lets through trains like the same model in transformers."""
    runs = on_ranks(SINGLE, train_with_worker, model(any_model), mini_batches(), subject.settings())
    expected = plain_run(any_model)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


@clause("numbers.md#loss")
@pytest.mark.parametrize("cut", [{"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 128}], ids=str)
def test_micro_batches_change_no_number(
    cut: dict[str, int], subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """However a step is cut into micro-batches, and packed, its numbers are the same: denominators are those of the
    step, never those of a micro-batch, and gradients of micro-batches are summed.
    """
    family = subject.family_at(some_layout)
    settings = subject.settings(some_layout, **cut)
    runs = on_ranks(some_layout, train_with_worker, model(family), mini_batches(), settings)
    expected = plain_run(family)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


SETTINGS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad": 0.05},
    "no clipping": {"clip_grad": None},
    "betas": {"betas": (0.8, 0.95)},
    "weight decay": {"weight_decay": 0.1},
}
"""Of the optimizer, each far enough from the default to show in the weights."""


@clause("engines.contract:BaseEngine.step")
@pytest.mark.parametrize("setting", SETTINGS)
def test_optimizer_settings_are_obeyed(
    setting: str, subject: Subject, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """Every setting of AdamW and of clipping does what `OptimizerConfig` says. The gradient norm is told as it was
    before clipping.
    """
    family, changed = subject.families[0], SETTINGS[setting]
    optimizer = {**OPTIMIZER, **changed}
    runs = on_ranks(SINGLE, train_with_worker, model(family), mini_batches(), subject.settings(), optimizer)
    expected = plain_run(family, **changed)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


@clause("engines.contract:BaseEngine.schedule_step")
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_are_obeyed(
    schedule: str, subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """Step k uses lr * k / warmup_steps while k <= warmup_steps, then the constant rate, or a linear or cosine way to
    0 at the last step; `lr` in the metrics is the rate that the step used.
    """
    family, changed = subject.family_at(some_layout), {"schedule": schedule, "warmup_steps": 2}
    settings, optimizer = subject.settings(some_layout), {**OPTIMIZER, **changed}
    runs = on_ranks(some_layout, train_with_worker, model(family), mini_batches(), settings, optimizer)
    expected = plain_run(family, **changed)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


FIRST = mini_batches()[0]
ADVANTAGES = [[(place + index) % 3 - 0.5 for index in range(len(one.input_ids))] for place, one in enumerate(FIRST)]
"""Of each token: what it counts, for or against."""


class Surrogate:
    """PPO's ratio, unclipped, times advantages; and how far the policy is from the one that sampled."""

    needs = frozenset({"log_probs"})
    fields = frozenset({"old_log_probs", "advantages", "loss_mask"})
    targets_only = True
    equal_weights = False
    coefficients: ClassVar = {"surrogate": 1.0, "gap": 0.0}

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        return dict.fromkeys(self.coefficients, batch["loss_mask"].sum())

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
        assert out.log_probs is not None
        mask = batch["loss_mask"]
        gap = out.log_probs[mask] - batch["old_log_probs"][mask]
        return {"surrogate": -(gap.exp() * batch["advantages"][mask]).sum(), "gap": gap.abs().sum()}


def infer_then_train(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    batch = pack(FIRST).with_tokens(advantages=torch.tensor([one for row in ADVANTAGES for one in row]))
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        old = worker.infer_batch(batch).outputs
        assert old is not None and old.log_probs is not None
        batch = batch.with_tokens(old_log_probs=old.log_probs)
        return [worker.train_mini_batch(batch, Surrogate()) for _ in range(2)]


@cache
def plain_surrogate(folder: Path) -> plain.Run:
    """The same in plain PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train()
    old = [plain.log_probs(model, sample.input_ids)[1:] for sample in FIRST]

    def parts(samples: Sequence[Sample]) -> Iterator[Tensor]:
        targets = sum(sample.num_targets for sample in samples)
        for sample, before, advantages in zip(samples, old, ADVANTAGES, strict=True):
            logits = model(torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1]
            log_probs = -cross_entropy(logits, torch.tensor(sample.input_ids[1:]), reduction="none")
            counted = (log_probs - before).exp() * torch.tensor(advantages[1:])
            yield -counted[torch.tensor(sample.loss_mask[1:])].sum() / targets

    optimizer: dict[str, Any] = OPTIMIZER
    return plain.descend(list(model.parameters()), [FIRST, FIRST], parts, **optimizer)


@clause("engines.contract:BaseEngine.forward_backward_batch")
def test_training_sees_what_inference_reported(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """The first pass of an update has the log-probabilities that the inference pass reported, so that a ratio of
    policies begins at 1; a loss whose tokens weigh differently trains as it does in plain PyTorch.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout, micro_batch_size=2)
    expected = plain_surrogate(folder)
    # not their norms, which other clauses compare: clipped, gradients leave the same loss whatever they are scaled by
    wanted = [{"loss": loss} for loss in expected.losses]
    for rank, steps in enumerate(on_ranks(some_layout, infer_then_train, folder, settings)):
        first, second = steps
        assert first["loss/gap"] < 5e-6, f"log-probabilities of training are off by {first['loss/gap']} on average"
        assert_near(steps, wanted, METRICS, f"with a ratio of policies and advantages, on rank {rank}")
        assert all(one["loss"] == one["loss/surrogate"] for one in steps), "a term with coefficient 0 is in the loss"
        assert second["loss/gap"] > 1e-4, "the step on this loss did not change the policy"
