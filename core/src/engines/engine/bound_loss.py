"""A loss with the denominators of one step, ready to be called inside any schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engines.batch import Batch, TokenOutputs
from engines.contract import MicroResult
from engines.errors import BatchError
from engines.losses import Loss


class StepLoss:
    """`contract.BoundLoss`: sum over terms of coefficient * sum / denominator, for one micro-batch at a time."""

    def __init__(self, loss: Loss, denominators: Mapping[str, float], keep: Iterable[str] = ()) -> None:
        self.needs = frozenset(loss.needs)
        self._loss = loss
        self._denominators = denominators
        self._keep = frozenset(keep)
        self.targets_only = loss.targets_only and not self._keep
        self.equal_weights = loss.equal_weights

    def __call__(self, outputs: TokenOutputs, micro_batch: Batch) -> tuple[Tensor, MicroResult]:
        """See `contract.BoundLoss`."""
        kept = outputs.keep(self._keep) if self._keep else None
        if micro_batch.is_filler:
            return _attached_zero(outputs), MicroResult({}, kept)
        sums = self._loss(outputs, micro_batch)
        if set(sums) != set(self._loss.coefficients):
            raise BatchError(
                f"{type(self._loss).__name__} returned the terms {sorted(sums)}, but declares coefficients for "
                f"{sorted(self._loss.coefficients)}"
            )
        total: Tensor | None = None
        for name, value in sums.items():
            coefficient, denominator = self._loss.coefficients[name], self._denominators[name]
            if coefficient and denominator:
                scaled = value * (coefficient / denominator)
                total = scaled if total is None else total + scaled
        total = total if total is not None else _attached_zero(outputs)
        return total, MicroResult({name: value.detach().double().cpu() for name, value in sums.items()}, kept)

    def value(self, sums: Mapping[str, float]) -> float:
        """The step's loss from each term's sum over everything."""
        pairs = ((self._loss.coefficients[name], value, self._denominators[name]) for name, value in sums.items())
        return sum(c * value / d for c, value, d in pairs if c and d)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Each term's sum over its denominator; 0 where nothing counts."""
        return {name: value / d if (d := self._denominators[name]) else 0.0 for name, value in sums.items()}


def _attached_zero(outputs: TokenOutputs) -> Tensor:
    """Zero by selecting nothing, so that backward still reaches every output, and NaN can't leak into it."""
    total: Tensor | None = None
    for value in outputs.present().values():
        nothing = value[:0].sum()
        total = nothing if total is None else total + nothing
    return total if total is not None else torch.zeros(())
