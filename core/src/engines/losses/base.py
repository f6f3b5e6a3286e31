"""What a loss is: named sums over target-aligned outputs, with denominators known before the first forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engines.batch import Batch, TokenOutputs


class Loss(Protocol):
    """A loss that runs on every backend, since it never sees logits.

    The loss of a step is the sum over terms of coefficient * (sum over all micro-batches and data-parallel
    ranks) / denominator. A term with coefficient 0 is a metric. Sequence-level losses may rely on whole
    sequences: engines gather their outputs over context and sequence parallelism first.
    """

    needs: frozenset[str]
    """Fields of `TokenOutputs` that it reads; one that the engine lacks is refused at configuration."""
    fields: frozenset[str]
    """Fields of the batch that it reads; checked before the first collective."""
    targets_only: bool
    """Whether it reads outputs only where `loss_mask` is set, so that engines may skip the head elsewhere."""
    equal_weights: bool
    """Whether its derivative is the same number for the log-probability of every target of a micro-batch, so that
    engines may make the head's gradients in the forward pass and scale them later. Where it isn't, the result is
    right all the same, and slower."""

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Every term by name, with its weight in the loss; a plain attribute will do."""
        ...

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """This batch's share of each term's denominator, 0-d; a function of the batch alone.

        Called on every rank with its replica's share before the first forward; core sums over data-parallel
        ranks. Where a denominator is 0 its term is 0; where all (with coefficient != 0) are, the step is skipped.
        """
        ...

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
        """Each term's sum over this micro-batch, 0-d; select targets, never multiply by a mask."""
        ...
