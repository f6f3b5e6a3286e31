"""Log-probabilities and entropy of targets from hidden states, chunk by chunk: no `[tokens, vocabulary]` logits.

With logits z, softmax p and target t of a row, in float32 whatever the model computes in:

    log_prob = z[t] - logsumexp(z)                 d log_prob / d z = onehot(t) - p
    entropy  = -sum(p * log p)                     d entropy  / d z = -p * (log p + entropy)

The backward pass computes each chunk's logits again, a third matrix product on top of the two it needs anyway.
Where every row's log-probability has the same weight in the loss, as in supervised fine-tuning, that is saved:
the forward pass makes the gradients at once and the backward pass scales them.

Of a vocabulary that tensor-parallel ranks share, each computes its own tokens' logits; logsumexp, z[t] and the sum of
the entropy are reduced over the ranks, a number per row each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engines.models.head import Head, HeadGradients, rows_per_chunk
from engines.models.softmax import ShardedSoftmax, Softmax, VocabularyShard


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    shard: VocabularyShard | None = None,
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

    `shard`: `weight` and `bias` are this rank's rows of them. Every rank of the group calls, with the same `hidden`,
    `targets` and settings, and gets the same results; the logits stay where they are. Only the forward pass
    communicates: the gradients of `weight` and `bias` are this rank's own (0 for padding), that of `hidden` is **this
    rank's share only**. The gradient of the hidden states is the sum over the group, which the caller has to take, as
    do Megatron's `copy_to_tensor_model_parallel_region` or its gather of a sequence-parallel region in front of the
    head.
    """
    vocabulary = len(weight)
    if shard is not None:
        vocabulary = shard.mean_tokens()
        weight, bias = shard.without_padding(weight), None if bias is None else shard.without_padding(bias)
    rows = chunk_rows or rows_per_chunk(len(hidden), vocabulary)
    ahead = equal_weights and torch.is_grad_enabled() and not need_entropy
    settings = _Settings(rows, need_entropy, softcap, scale, ahead, shard)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, bias, targets, settings)  # type: ignore[no-untyped-call]
    return log_probs, entropy if need_entropy else None


@dataclass(frozen=True)
class _Settings:
    chunk_rows: int
    need_entropy: bool
    softcap: float | None
    scale: float | None
    ahead: bool
    shard: VocabularyShard | None

    def softmax(self, hidden: Tensor, normalizer: Tensor | None = None) -> Softmax:
        """`normalizer`: in the backward pass, what the forward pass's softmax kept."""
        if self.shard is None:
            return Softmax()
        if normalizer is None:
            return ShardedSoftmax(self.shard, hidden.new_empty((2, len(hidden)), dtype=torch.float32), known=False)
        return ShardedSoftmax(self.shard, normalizer, known=True)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, settings.scale, settings.softcap)
        softmax = settings.softmax(hidden)
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(log_probs) if settings.need_entropy else log_probs.new_empty(0)
        wanted = ctx.needs_input_grad[:3]
        grads = HeadGradients(hidden, head, wanted) if settings.ahead and any(wanted) else None
        for rows, logits, log_p in _chunks(hidden, head, softmax, settings.chunk_rows):
            log_probs[rows] = softmax.pick(log_p, targets[rows])
            if settings.need_entropy:
                entropy[rows] = _entropy(log_p)
            if grads is not None:
                grad = log_p.exp_().neg_()
                grads.add(rows, softmax.add_at_(grad, targets[rows], grad.new_ones(len(grad))), logits)
        softmax.sum_(log_probs)
        softmax.sum_(entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, softmax.normalizer)
        ctx.settings, ctx.ahead = settings, grads
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, normalizer = ctx.saved_tensors
        settings: _Settings = ctx.settings
        ahead, ctx.ahead = ctx.ahead, None  # scaled in place below: a second backward pass computes again
        if ahead is not None and len(hidden) > 0 and bool((grad_log_probs == grad_log_probs[0]).all()):
            return *ahead.finish(grad_log_probs[0]), None, None
        head = Head(weight, bias, settings.scale, settings.softcap)
        softmax = settings.softmax(hidden, normalizer)
        grads = HeadGradients(hidden, head, ctx.needs_input_grad[:3])
        for rows, logits, log_p in _chunks(hidden, head, softmax, settings.chunk_rows):
            if settings.need_entropy:
                pull = (log_p.clamp(min=_LOWEST) + entropy[rows, None]).mul_(grad_entropy[rows, None])
                pull.add_(grad_log_probs[rows, None])
            else:
                pull = grad_log_probs[rows, None]
            grad = log_p.exp_().mul_(pull).neg_()
            grads.add(rows, softmax.add_at_(grad, targets[rows], grad_log_probs[rows]), logits)
        return *grads.finish(None), None, None


_LOWEST = torch.finfo(torch.float32).min


def _chunks(hidden: Tensor, head: Head, softmax: Softmax, chunk_rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each chunk's rows, logits and their log-softmax; the two tensors are overwritten by the next chunk.

    The same two buffers serve a whole pass: fresh ones for each chunk cost page faults and scatter the heap.
    """
    shape = (2, min(chunk_rows, len(hidden)), len(head.weight))
    buffers = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, min(start + chunk_rows, len(hidden)))
        logits, log_p = buffers[:, : rows.stop - rows.start]
        head.logits(hidden[rows], logits)
        softmax.log_softmax(rows, logits, log_p)
        yield rows, logits, log_p


def _entropy(log_p: Tensor) -> Tensor:
    """-sum(p * log p) per row; where p is 0 its log is kept finite, so that the product is 0."""
    return -(log_p.exp() * log_p.clamp(min=_LOWEST)).sum(-1)
