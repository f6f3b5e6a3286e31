"""What the steps of a run say, and how near that is to what they should."""

from __future__ import annotations

from collections.abc import Sequence

from engines.losses import SFTLoss
from engines.testing.plain import Sample
from engines.testing.runs import pack
from engines.worker import TrainingWorker

NUMBERS = ("loss", "grad_norm")
Numbers = list[dict[str, float]]
"""Of each step."""


def numbers_of(
    worker: TrainingWorker, mini_batches: Sequence[Sequence[Sample]], more: Sequence[str] = ()
) -> list[dict[str, float]]:
    """A step on each of `mini_batches`: its `NUMBERS`, and the metrics that `more` names."""
    steps = [worker.train_mini_batch(pack(samples), SFTLoss()) for samples in mini_batches]
    return [{name: step[name] for name in (*NUMBERS, *more)} for step in steps]


def assert_near(found: Numbers, expected: Numbers, tolerance: float, where: str) -> None:
    """`expected` names the numbers that count."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        for name, value in theirs.items():
            assert abs(ours[name] - value) <= tolerance * abs(value), (
                f"{name} of step {step} is {ours[name]} {where} instead of {value}"
            )
