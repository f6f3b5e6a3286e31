"""Supervised fine-tuning: cross entropy of the target tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from engines.batch import Batch, TokenOutputs


class SFTLoss:
    """Sum of cross entropies of target tokens / their number, over the whole mini-batch."""

    needs = frozenset({"log_probs"})
    fields = frozenset({"loss_mask"})
    targets_only = True
    equal_weights = True
    coefficients: ClassVar[Mapping[str, float]] = {"cross_entropy": 1.0}

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """The number of target tokens."""
        return {"cross_entropy": batch["loss_mask"].sum()}

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
        """The sum of -log p over target tokens."""
        assert out.log_probs is not None
        return {"cross_entropy": -out.log_probs[batch["loss_mask"]].sum()}
