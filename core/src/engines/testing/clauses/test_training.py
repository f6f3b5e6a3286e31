"""Training gives the numbers of plain transformers and PyTorch, whatever the layout and the micro-batches."""

from __future__ import annotations

import pytest

from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks, PlainRun
from engines.testing.layouts import Layout
from engines.testing.runs import assert_metrics_agree, assert_weights_agree, train_with_worker
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject

METRICS, WEIGHTS = 5e-6, 3e-5
"""Largest relative difference of loss and gradient norm, and of weights after three steps; sound engines are below a
tenth of it."""


@clause("numbers.md#numbers")
def test_training_equals_plain_pytorch(
    subject: Subject, layout: Layout, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """Loss, gradient norm and updated weights are those of one process that runs each sample by itself, at every
    layout: the gradient of a parameter is the plain sum of d(loss term / denominator) over all micro-batches,
    data-parallel ranks and token shards.
    """
    family = subject.family_at(layout)
    runs = on_ranks(layout, train_with_worker, model(family), mini_batches(), subject.settings(layout))
    expected = plain_run(family)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


@clause("numbers.md#numbers")
@pytest.mark.parametrize(
    "cut", [{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_tokens_per_micro_batch": 128}], ids=str
)
def test_micro_batches_change_no_number(
    cut: dict[str, int],
    subject: Subject,
    some_layout: Layout,
    on_ranks: OnRanks,
    model: Model,
    plain_run: PlainRun,
) -> None:
    """However a step is cut into micro-batches, and packed, its numbers are the same: denominators are those of the
    step, never of a micro-batch.
    """
    family = subject.family_at(some_layout)
    settings = subject.settings(some_layout, **cut)
    runs = on_ranks(some_layout, train_with_worker, model(family), mini_batches(), settings)
    expected = plain_run(family)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)
