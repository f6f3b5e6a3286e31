"""Inputs at the edges: tiny, masked, too long, too few for the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.batch import Batch
from engines.errors import BatchError
from engines.losses import SFTLoss
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks, PlainRun
from engines.testing.layouts import Layout
from engines.testing.plain import Sample
from engines.testing.runs import OPTIMIZER, assert_metrics_agree, assert_weights_agree, pack, train_with_worker
from engines.testing.samples import masked, mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

METRICS, WEIGHTS = 5e-6, 3e-5


@clause("contract.md#batches-rules-and-fillers")
def test_fewer_samples_than_ranks_or_stages(
    subject: Subject, layout: Layout, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """A rank without samples, and a stage that wants more micro-batches, run fillers, which take part in every
    collective and in no number.
    """
    family = subject.family_at(layout)
    runs = on_ranks(layout, train_with_worker, model(family), mini_batches(1), subject.settings(layout))
    expected = plain_run(family, 1)
    assert_metrics_agree(runs, expected, METRICS)
    assert_weights_agree(runs[0].weights, expected.weights, WEIGHTS)


def with_single_tokens(folder: Path, settings: dict[str, Any], samples: Sequence[Sample]) -> tuple[Any, Any]:
    """A step on the samples with sequences of one token among them, and on the samples alone."""
    single = [Sample([sample.input_ids[0]], [True]) for sample in samples]
    mixed = [one for pair in zip(single, samples, strict=True) for one in pair]
    found = []
    for chosen in (mixed, list(samples)):
        with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
            worker.initialize()
            skipped = worker.train_mini_batch(pack(single), SFTLoss())["skipped_step"]
            assert skipped == "empty", f"sequences of one token alone: skipped_step is {skipped!r}"
            outputs = worker.infer_batch(pack(single)).outputs
            assert outputs is not None and outputs.log_probs is not None
            assert not outputs.log_probs.any(), f"log-probabilities of lone tokens are {outputs.log_probs.tolist()}"
            metrics = worker.train_mini_batch(pack(chosen), SFTLoss())
            found.append((metrics["loss"], metrics["grad_norm"]))
    return found[0], found[1]


@clause("engines.batch:Batch")
def test_sequences_of_one_token(subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """A sequence of one token predicts nothing: it is run, has log-probability 0, and changes no number."""
    folder, samples = model(subject.family_at(some_layout)), mini_batches()[0][:4]
    settings = subject.settings(some_layout, micro_batch_size=2)
    for found, expected in on_ranks(some_layout, with_single_tokens, folder, settings, samples):
        for name, one, other in zip(("loss", "grad_norm"), found, expected, strict=True):
            assert abs(one / other - 1) < METRICS, f"{name} is {one} with sequences of one token, {other} without"


def some_masked(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One step in which only the first replica has targets."""
    samples = mini_batches()[0]
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        share = pack(samples if worker.engine.ranks.dp_rank == 0 else masked(samples))
        return worker.engine.train_batch(share, SFTLoss())


@clause("contract.md#batches-rules-and-fillers", needs=("data_parallel",))
def test_replicas_without_targets_take_part(
    subject: Subject, parallel_layout: Layout, on_ranks: OnRanks, model: Model, plain_run: PlainRun
) -> None:
    """A replica whose samples are masked altogether takes part in the step; the others' numbers stay as they are."""
    family = subject.family_at(parallel_layout)
    expected = plain_run(family)
    for metrics in on_ranks(parallel_layout, some_masked, model(family), subject.settings(parallel_layout)):
        assert metrics["skipped_step"] is None, f"a step with targets on one replica is {metrics['skipped_step']}"
        for name, value in (("loss", expected.losses[0]), ("grad_norm", expected.grad_norms[0])):
            assert abs(metrics[name] / value - 1) < METRICS, f"{name} is {metrics[name]} instead of {value}"


def too_long(folder: Path, settings: dict[str, Any]) -> tuple[str, float]:
    samples = mini_batches()[0]
    short = [sample for sample in samples if len(sample.input_ids) <= 64]
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        with pytest.raises(BatchError) as refusal:
            worker.train_mini_batch(pack(samples), SFTLoss())
        return str(refusal.value), worker.train_mini_batch(pack(short), SFTLoss())["loss"]


@clause("engines.engine:Engine.train_batch")
def test_a_sequence_longer_than_the_budget(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """A sequence that no micro-batch may hold is refused on all ranks alike, whichever has it, before any
    forward; the engine trains on.
    """
    folder = model(subject.family_at(some_layout))
    settings = subject.settings(some_layout, max_tokens_per_micro_batch=64)
    answers = on_ranks(some_layout, too_long, folder, settings)
    assert len({loss for _, loss in answers}) == 1, "ranks go on with other losses"
    assert all(message for message, _ in answers)


def infer_nothing(folder: Path, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with TrainingWorker({"path": str(folder)}, settings) as worker:
        worker.initialize()
        result = worker.infer_batch(Batch.empty(), loss=SFTLoss())
        assert result.outputs is not None and result.outputs.log_probs is not None
        return tuple(result.outputs.log_probs.shape), result.metrics


@clause("contract.md#batches-rules-and-fillers")
def test_no_sequence_at_all(subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """A batch without sequences has no outputs and loss 0, and leaves nobody waiting."""
    settings = subject.settings(some_layout)
    for shape, metrics in on_ranks(some_layout, infer_nothing, model(subject.family_at(some_layout)), settings):
        assert shape == (0,), f"outputs of no sequence have the shape {shape}"
        counted = {name: metrics[name] for name in ("tokens", "targets", "loss")}
        assert not any(counted.values()), f"a batch without sequences has {counted}"
