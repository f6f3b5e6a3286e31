"""What of a head's outputs a pass needs."""

from __future__ import annotations

from typing import NamedTuple

from engines.contract import BoundLoss


class Asked(NamedTuple):
    """What an engine asks of the head in each micro-batch of a pass."""

    needs: frozenset[str] = frozenset()
    """Outputs, by name."""
    targets_only: bool = False
    """Whether 0 will do where `loss_mask` isn't set."""
    equal_weights: bool = False
    """Whether every target's log-probability counts alike, see `Loss.equal_weights`."""

    @classmethod
    def of(cls, loss: BoundLoss | None, needs: frozenset[str]) -> Asked:
        """By the arguments of `forward_backward_batch`: outputs to return must be whole, whatever the loss reads."""
        if loss is None:
            return cls(needs)
        targets_only = loss.targets_only and not needs
        return cls(needs | loss.needs, targets_only, targets_only and loss.equal_weights)
