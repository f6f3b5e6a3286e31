"""A step that must change nothing changes nothing, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.batch import Batch, TokenOutputs
from engines.losses import SFTLoss
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.plain import Sample
from engines.testing.runs import OPTIMIZER, pack, same_bits, weights_of
from engines.testing.samples import masked, mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

SCHEDULE = {**OPTIMIZER, "warmup_steps": 4, "weight_decay": 0.1}
"""With a schedule and a decay, so that a skipped step that counted, or decayed, would show."""


class Scaled(SFTLoss):
    """Cross entropy with a factor per sequence: inf or NaN in one sequence reaches the gradients of one rank."""

    fields = frozenset({"loss_mask", "factor"})
    equal_weights = False

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
        assert out.log_probs is not None
        parts = zip(out.log_probs.split(batch.lengths), batch["loss_mask"].split(batch.lengths), strict=True)
        sums = [-values[mask].sum() * factor for (values, mask), factor in zip(parts, batch["factor"], strict=True)]
        return {"cross_entropy": torch.stack(sums).sum() if sums else out.log_probs.sum() * 0}


def scaled(samples: Sequence[Sample], factor: float) -> Batch:
    """The samples, the first one's loss times `factor`."""
    factors = torch.ones(len(samples))
    factors[0] = factor
    return pack(samples).with_sequences(factor=factors)


ONE, TWO, _ = mini_batches()
SKIPPED = {
    "without targets": (scaled(masked(ONE), 1.0), "empty"),
    "without samples": (scaled(ONE, 1.0).select([]), "empty"),
    "infinite": (scaled(ONE, math.inf), "non_finite"),
    "not a number": (scaled(ONE, math.nan), "non_finite"),
}


def steps(folder: Path, batches: Sequence[Batch], settings: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """Each batch's metrics, whether the weights are to the bit as before, and the weights in the end."""
    with TrainingWorker({"path": str(folder)}, settings, SCHEDULE) as worker:
        worker.initialize()
        seen, before = [], weights_of(worker)
        for batch in batches:
            metrics = worker.train_mini_batch(batch, Scaled())
            after = weights_of(worker)
            seen.append((metrics, same_bits(before, after)))
            before = after
        return seen, before


@clause("engines.contract:BaseEngine.step")
def test_a_skipped_step_changes_nothing(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """With a gradient norm that isn't finite, on whatever rank, all ranks skip the step: weights, optimizer state and
    schedule are to the bit as if it had never been, and `skipped_step` says why. A step without anything that counts
    is skipped by core.
    """
    good = [scaled(ONE, 1.0), scaled(TWO, 1.0)]
    bad = [batch for batch, _ in SKIPPED.values()]
    settings, folder = subject.settings(some_layout, micro_batch_size=2), model(subject.family_at(some_layout))
    everyone = on_ranks(some_layout, steps, folder, [*bad, good[0], *bad, good[1]], settings)
    expected, weights = on_ranks(some_layout, steps, folder, good, settings)[0]
    for rank, (seen, after) in enumerate(everyone):
        skipped = [seen.pop(0) for _ in bad] + [seen.pop(1) for _ in bad]
        for (metrics, unchanged), kind in zip(skipped, [*SKIPPED, *SKIPPED], strict=True):
            said, reason = f"on rank {rank}, for a step that is {kind},", SKIPPED[kind][1]
            assert metrics["skipped_step"] == reason, f"{said} skipped_step is {metrics['skipped_step']!r}"
            assert unchanged, f"{said} weights changed"
            if reason == "non_finite":
                assert not math.isfinite(metrics["grad_norm"]), f"{said} grad_norm is {metrics['grad_norm']}"
        differing = [
            f"{key}: {one[key]} instead of {other[key]}"
            for (one, _), (other, _) in zip(seen, expected, strict=True)
            for key in other
            if one[key] != other[key] and "memory" not in key
        ]
        # in the warmup each step that counts raises the rate
        ahead = any(one["lr"] > other["lr"] for (one, _), (other, _) in zip(seen, expected, strict=True))
        why = "; lr is further along: the schedule counted steps that were skipped" if ahead else ""
        assert not differing, f"on rank {rank} the steps around the skipped ones differ: {', '.join(differing)}{why}"
        assert rank or same_bits(after, weights), "the steps around the skipped ones leave other weights"
