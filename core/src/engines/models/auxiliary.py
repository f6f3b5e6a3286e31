"""Auxiliary losses of a mixture-of-experts layer, one formula for every engine.

They are defined for the rows of one micro-batch in one layer. With E experts, T rows and k experts a row, softmax p
and logits z of the router:

    load balancing = E * sum_e f_e * P_e      f_e: rows sent to e / (T * k),  P_e: mean of p_e over the rows
    z              = mean over the rows of logsumexp(z)^2

The first is that of Switch Transformers (https://arxiv.org/abs/2101.03961, equations 4 to 6), for k experts: 1 where
rows and probabilities are spread evenly. The second is from ST-MoE (https://arxiv.org/abs/2202.08906, equation 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingSums:
    """What both losses need to know of a layer's rows: sums, which add up over the shards of a micro-batch."""

    rows: Tensor
    """0-d, how many rows count."""
    counts: Tensor
    """`[E]`, rows sent to each expert."""
    probabilities: Tensor
    """`[E]`, sum of the router's probabilities; differentiable."""
    squares: Tensor
    """0-d, sum of `logsumexp(z)^2`; differentiable."""

    @classmethod
    def of(cls, logits: Tensor, chosen: Tensor, real: Tensor | None = None) -> RoutingSums:
        """From a router's `logits` `[rows, E]` and the experts `chosen`, bool `[rows, E]`; sums in float32.

        `real`, bool `[rows]`: rows that count, others are padding; None: all.
        """
        logits = logits.float()
        if real is None:
            real = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        weight = real.to(logits.dtype)
        return cls(
            rows=weight.sum(),
            counts=weight @ chosen.to(logits.dtype),
            probabilities=weight @ logits.softmax(-1),
            squares=weight @ logits.logsumexp(-1).square(),
        )

    @property
    def load_balancing_loss(self) -> Tensor:
        """0-d; 0 where no row counts. Linear in `probabilities`: with one shard's, it is that shard's summand."""
        fractions = self.counts / self.counts.sum().clamp(min=1)
        return len(self.counts) * (fractions @ self.probabilities) / self.rows.clamp(min=1)

    @property
    def z_loss(self) -> Tensor:
        """0-d; 0 where no row counts."""
        return self.squares / self.rows.clamp(min=1)

    def flat(self) -> Tensor:
        """`[2 * E + 2]`, all of them in one tensor, detached: what ranks add up."""
        return torch.cat([self.rows[None], self.squares[None], self.counts, self.probabilities]).detach()

    @classmethod
    def unflat(cls, flat: Tensor) -> RoutingSums:
        """The inverse of `flat`."""
        counts, probabilities = flat[2:].chunk(2)
        return cls(rows=flat[0], counts=counts, probabilities=probabilities, squares=flat[1])
