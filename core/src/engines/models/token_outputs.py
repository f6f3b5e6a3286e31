"""Log-probabilities and entropy of targets from hidden states, chunk by chunk: no `[tokens, vocabulary]` logits.

With logits z, softmax p and target t of a row, in float32 whatever the model computes in:

    log_prob = z[t] - logsumexp(z)                 d log_prob / d z = onehot(t) - p
    entropy  = -sum(p * log p)                     d entropy  / d z = -p * (log p + entropy)

The backward pass computes each chunk's logits again, a third matrix product on top of the two it needs anyway.
Where every row's log-probability has the same weight in the loss, as in supervised fine-tuning, that is saved:
the forward pass makes the gradients at once and the backward pass scales them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**23
"""Logits of a chunk, about 32 MiB in float32; a pass works in two such buffers."""


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: `softcap * tanh(scale * (h @ weight.T + bias) / softcap)`."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Written to `out`, float32 `[rows, vocabulary]`."""
        if hidden.dtype == out.dtype:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            out.copy_(hidden @ self.weight.T)
        if self.bias is not None:
            out.add_(self.bias)
        if self.scale is not None:
            out.mul_(self.scale)
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn, in place, the gradient of `logits` into that of `h @ weight.T + bias`."""
        if self.softcap is not None:  # tanh' = 1 - tanh^2
            grad.mul_(1 - (logits / self.softcap).square_())
        if self.scale is not None:
            grad.mul_(self.scale)
        return grad


def rows_per_chunk(rows: int, vocabulary: int) -> int:
    """Rows of equally large chunks of about `CHUNK_ELEMENTS` logits; small chunks cost as much as large ones."""
    chunks = min(rows, round(rows * vocabulary / CHUNK_ELEMENTS))
    return max(1, math.ceil(rows / max(1, chunks)))


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
    equal_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's target, and the entropy of its distribution if `need_entropy`.

    `hidden` `[rows, H]`, `weight` `[V, H]`, `bias` `[V]` in one dtype, `targets` int64 `[rows]`; returns float32
    `[rows]` each. Differentiable once in hidden, weight and bias. `chunk_rows`: rows computed together; None:
    `rows_per_chunk`. `equal_weights`: make the gradients ahead, in the forward pass; the caller expects the
    derivative of its loss to be the same for each row's log-probability. With no rows the result is empty, yet
    attached.
    """
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight))
    ahead = equal_weights and torch.is_grad_enabled() and not need_entropy
    settings = _Settings(rows, need_entropy, softcap, scale, ahead)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, settings)  # type: ignore[no-untyped-call]
    return log_probs, entropy if need_entropy else None


@dataclass(frozen=True)
class _Settings:
    chunk_rows: int
    need_entropy: bool
    softcap: float | None
    scale: float | None
    ahead: bool


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, settings.scale, settings.softcap)
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(log_probs) if settings.need_entropy else log_probs.new_empty(0)
        wanted = ctx.needs_input_grad[:3]
        grads = _Gradients(hidden, head, wanted) if settings.ahead and any(wanted) else None
        for rows, logits, log_p in _chunks(hidden, head, settings.chunk_rows):
            log_probs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            if settings.need_entropy:
                entropy[rows] = _entropy(log_p)
            if grads is not None:
                grads.add(rows, _log_prob_grad(log_p, targets[rows]), logits)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.settings, ctx.ahead = settings, grads
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        ahead, ctx.ahead = ctx.ahead, None  # scaled in place below: a second backward pass computes again
        if ahead is not None and len(hidden) > 0 and bool((grad_log_probs == grad_log_probs[0]).all()):
            return *ahead.finish(grad_log_probs[0]), None, None
        head = Head(weight, bias, settings.scale, settings.softcap)
        grads = _Gradients(hidden, head, ctx.needs_input_grad[:3])
        for rows, logits, log_p in _chunks(hidden, head, settings.chunk_rows):
            if settings.need_entropy:
                pull = (log_p.clamp(min=_LOWEST) + entropy[rows, None]).mul_(grad_entropy[rows, None])
                pull.add_(grad_log_probs[rows, None])
            else:
                pull = grad_log_probs[rows, None]
            grad = log_p.exp_().mul_(pull).neg_()
            grad.scatter_add_(1, targets[rows, None], grad_log_probs[rows, None])
            grads.add(rows, grad, logits)
        return *grads.finish(None), None, None


class _Gradients:
    """Gradients of hidden, weight and bias, gathered chunk by chunk from those of the logits."""

    def __init__(self, hidden: Tensor, head: Head, wanted: tuple[bool, ...]) -> None:
        want_hidden, want_weight, want_bias = wanted
        self._input, self._head = hidden, head
        self._hidden = torch.empty_like(hidden) if want_hidden else None
        fresh = torch.empty_like if len(hidden) > 0 else torch.zeros_like
        self._weight = fresh(head.weight, dtype=torch.float32) if want_weight else None
        self._bias = head.weight.new_zeros(len(head.weight), dtype=torch.float32) if want_bias else None

    def add(self, rows: slice, grad: Tensor, logits: Tensor) -> None:
        """Take in the gradient of a chunk's logits, overwriting it."""
        weight = self._head.weight
        grad = self._head.backward_(grad, logits)
        if self._bias is not None:
            self._bias += grad.sum(0)
        grad = grad.to(weight.dtype)
        if self._hidden is not None:
            torch.mm(grad, weight, out=self._hidden[rows])
        if self._weight is None:
            return
        kept = int(rows.start > 0)  # the first chunk overwrites, which spares a pass over the weight
        if grad.dtype == self._weight.dtype:
            self._weight.addmm_(grad.T, self._input[rows], beta=kept)
        else:  # low precision: each chunk's product is rounded once, their sum stays in float32
            product = grad.T @ self._input[rows]
            self._weight = self._weight.add_(product) if kept else self._weight.copy_(product)

    def finish(self, factor: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, multiplied in place by `factor`, in the dtypes of what they belong to."""
        grads = (self._hidden, self._weight, self._bias)
        if factor is not None:
            for grad in grads:
                if grad is not None:
                    grad.mul_(factor)
        return tuple(None if grad is None else grad.to(self._head.weight.dtype) for grad in grads)


_LOWEST = torch.finfo(torch.float32).min


def _chunks(hidden: Tensor, head: Head, chunk_rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each chunk's rows, logits and their log-softmax; the two tensors are overwritten by the next chunk.

    The same two buffers serve a whole pass: fresh ones for each chunk cost page faults and scatter the heap.
    """
    shape = (2, min(chunk_rows, len(hidden)), len(head.weight))
    buffers = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, min(start + chunk_rows, len(hidden)))
        logits, log_p = buffers[:, : rows.stop - rows.start]
        head.logits(hidden[rows], logits)
        torch.log_softmax(logits, -1, out=log_p)
        yield rows, logits, log_p


def _log_prob_grad(log_p: Tensor, targets: Tensor) -> Tensor:
    """d log_prob / d z, overwriting `log_p`."""
    grad = log_p.exp_().neg_()
    return grad.scatter_add_(1, targets[:, None], grad.new_ones(len(targets), 1))


def _entropy(log_p: Tensor) -> Tensor:
    """-sum(p * log p) per row; where p is 0 its log is kept finite, so that the product is 0."""
    return -(log_p.exp() * log_p.clamp(min=_LOWEST)).sum(-1)
