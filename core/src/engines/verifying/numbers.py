"""What is compared, and how far apart it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Numbers:
    """One number for each thing that is compared; as differences, inf stands for what can't be compared."""

    loss: float
    grad_norm: float
    weights: float
    exported: float

    def as_json(self) -> dict[str, float | None]:
        """By name; null for inf, which JSON hasn't."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    def within(self, tolerances: Numbers) -> dict[str, bool]:
        """Of each number, whether it is small enough."""
        return {name: value <= getattr(tolerances, name) for name, value in asdict(self).items()}


TOLERANCES = Numbers(loss=5e-6, grad_norm=5e-6, weights=3e-5, exported=3e-5)
"""Largest relative differences, in float32: of the loss and gradient norm of any step, and of the weights after the
last, those of each tensor relative to its largest value. Raised for models that magnify rounding, see `raised`.
"""
ROUNDINGS = 10.0
"""A run may be so many times as far from the baseline as the baseline is from itself on weights that are rounded
otherwise: it rounds at every operation, not once."""
LOOSEST = 1e-3
"""But no more: a run in which rounding counts for so much says nothing about engines."""


@dataclass(frozen=True)
class Trained:
    """What a rank says about a run; what concerns the weights is known to rank 0 alone."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    """A value for each step."""
    weights: float
    exported: float
    """Largest relative differences from the weights of the run that it is compared with."""
    faults: Sequence[str]
    """What isn't a matter of tolerance: names and shapes of weights, and bits of the export."""
    seconds: float


def relative(found: float, expected: float) -> float:
    """The relative difference; inf where it is no number."""
    off = abs(found - expected)
    if off == 0:
        return 0.0
    return off / abs(expected) if math.isfinite(off) and expected else math.inf


def compare(trained: Trained, baseline: Trained) -> Numbers:
    """How far a run is from another one of as many steps."""
    return Numbers(
        loss=max(relatives(trained.losses, baseline.losses)),
        grad_norm=max(relatives(trained.grad_norms, baseline.grad_norms)),
        weights=trained.weights,
        exported=trained.exported,
    )


def raised(by_rounding: Numbers) -> Numbers:
    """The tolerances for a model of which rounding the first weights otherwise changes the numbers so much."""
    return Numbers(
        **{
            name: min(max(stated, ROUNDINGS * getattr(by_rounding, name)), LOOSEST)
            for name, stated in asdict(TOLERANCES).items()
        }
    )


def relatives(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """The relative difference at each step."""
    return [relative(one, other) for one, other in zip(found, expected, strict=True)]
