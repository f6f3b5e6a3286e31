"""Metrics: the same keys on every engine, one value, equal on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.losses import SFTLoss
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.runs import OPTIMIZER, assert_counts_agree, pack
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

EVALUATED = {"tokens", "targets", "loss", "loss/cross_entropy"}
TRAINED = {*EVALUATED, "grad_norm", "lr", "skipped_step"}
TOLERANCE = 1e-6


def evaluate_and_train(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    batch = pack(mini_batches()[0])
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        return worker.evaluate(batch, SFTLoss()), worker.train_mini_batch(batch, SFTLoss())


@clause("engines.engine:Engine.train_batch")
def test_metrics_are_one_value_equal_on_all_ranks(
    subject: Subject, layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """Loss, its terms and counts are those of all data-parallel ranks, told to every rank of every replica, whichever
    computed them; evaluation and training tell the same loss.
    """
    folder = model(subject.family_at(layout))
    answers = on_ranks(layout, evaluate_and_train, folder, subject.settings(layout, micro_batch_size=3))
    samples = mini_batches()[0]
    for rank, (evaluated, trained) in enumerate(answers):
        assert evaluated.keys() >= EVALUATED, f"rank {rank} lacks {EVALUATED - evaluated.keys()} in evaluation"
        assert trained.keys() >= TRAINED, f"rank {rank} lacks {TRAINED - trained.keys()} in training"
        for found in (evaluated, trained):
            assert_counts_agree(found, samples)
            assert found["loss"] == found["loss/cross_entropy"], (
                f"the only term is not the loss on rank {rank}: {found}"
            )
        assert trained["skipped_step"] is None, f"rank {rank} skipped a step: {trained['skipped_step']}"
        assert trained["lr"] == OPTIMIZER["lr"], f"lr is {trained['lr']} instead of {OPTIMIZER['lr']} on rank {rank}"
        off = abs(evaluated["loss"] / trained["loss"] - 1)
        assert off < TOLERANCE, f"loss is {evaluated['loss']} in evaluation, {trained['loss']} in training"
        for name, mine, first in zip(("evaluation", "training"), (evaluated, trained), answers[0], strict=True):
            differing = {key for key in first if "memory" not in key and mine.get(key) != first[key]}
            assert not differing, f"ranks 0 and {rank} tell other {sorted(differing)} in {name}"
