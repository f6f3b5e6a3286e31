"""Log-probabilities and entropy of targets from hidden states, chunk by chunk: no `[tokens, vocabulary]` logits.

With logits z, softmax p and target t of a row, in float32 whatever the model computes in:

    log_prob = z[t] - logsumexp(z)                 d log_prob / d z = onehot(t) - p
    entropy  = logsumexp(z) - sum(p * z)           d entropy  / d z = -p * (z - sum(p * z))

The backward pass computes a chunk's logits again; only where all rows fit into one chunk are they kept, since
that costs no more than a chunk's working memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**25
"""Logits that a chunk may hold, 128 MiB in float32."""


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: `softcap * tanh(scale * (h @ weight.T + bias) / softcap)`."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[rows, vocabulary]`; owned by the caller, who may overwrite it."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self.scale is not None:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn, in place, the gradient of `logits` into that of `h @ weight.T + bias`."""
        if self.softcap is not None:  # tanh' = 1 - tanh^2, and logits = softcap * tanh
            grad.mul_(logits.div_(self.softcap).square_().neg_().add_(1))
        if self.scale is not None:
            grad.mul_(self.scale)
        return grad


def rows_per_chunk(vocabulary: int) -> int:
    """Rows whose logits fill a chunk."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_rows: int | None = None,
    need_entropy: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's target, and the entropy of its distribution if `need_entropy`.

    `hidden` `[rows, H]`, `weight` `[V, H]`, `bias` `[V]` in one dtype, `targets` int64 `[rows]`; returns float32
    `[rows]` each. Differentiable once in hidden, weight and bias. `chunk_rows`: rows computed together; None
    fills `CHUNK_ELEMENTS`. With no rows the result is empty, yet attached.
    """
    rows = chunk_rows or rows_per_chunk(weight.shape[0])
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, rows, need_entropy, softcap, scale)
    return log_probs, entropy if need_entropy else None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_rows: int,
        need_entropy: bool,
        softcap: float | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, scale, softcap)
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_sums = torch.empty_like(log_probs)
        means = torch.empty_like(log_probs) if need_entropy else log_probs.new_empty(0)
        kept = None
        for rows in _chunks(len(hidden), chunk_rows):
            logits = head.logits(hidden[rows])
            log_sums[rows] = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_sums[rows]
            if need_entropy:
                means[rows] = _mean_logit(logits, log_sums[rows])
            if len(hidden) <= chunk_rows and any(ctx.needs_input_grad[:3]):
                kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, means, kept)
        ctx.settings = (chunk_rows, need_entropy, softcap, scale)
        return log_probs, log_sums - means if need_entropy else means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, means, kept = ctx.saved_tensors
        chunk_rows, need_entropy, softcap, scale = ctx.settings
        head = Head(weight, bias, scale, softcap)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
        for rows in _chunks(len(hidden), chunk_rows):
            logits = head.logits(hidden[rows]) if kept is None else kept
            grad = torch.exp(logits - log_sums[rows, None])
            if need_entropy:
                pull = grad_entropy[rows, None] * (logits - means[rows, None]) + grad_log_probs[rows, None]
                grad.mul_(pull).neg_()
            else:
                grad.mul_(-grad_log_probs[rows, None])
            grad.scatter_add_(1, targets[rows, None], grad_log_probs[rows, None])
            grad = head.backward_(grad, logits)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _accumulate(grad_weight, grad, hidden[rows])
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(weight.dtype) if grad_bias is not None else None,
            *[None] * 5,
        )


def _chunks(rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]


def _mean_logit(logits: Tensor, log_sums: Tensor) -> Tensor:
    """sum(p * z) per row; a logit of -inf has probability 0 and adds nothing."""
    return (torch.exp(logits - log_sums[:, None]) * logits).nan_to_num(nan=0.0).sum(-1)


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, hidden)
    else:  # low precision: each chunk's product is rounded once, their sum stays in float32
        total += grad.T @ hidden
