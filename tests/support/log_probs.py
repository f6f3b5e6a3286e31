"""What log-probabilities of a head are compared with, and a loss to take their gradients from."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from the logits of all rows."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * (scale or 1)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def objective(log_probs: Tensor, entropy: Tensor | None, *, uniform: bool) -> Tensor:
    """A scalar in which every output has its own weight, unless `uniform`."""
    weights = torch.full_like(log_probs, -0.3) if uniform else torch.linspace(-1, 1, len(log_probs)).to(log_probs)
    value = (log_probs * weights).sum()
    return value if entropy is None else value + (entropy.square() * weights.flip(0)).sum()
