"""Log-softmax of chunks of logits, over a vocabulary that a rank holds whole or shares with a group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class VocabularyShard:
    """A tensor-parallel rank's rows of the head.

    Row i of the weight belongs to token `start + i` of a vocabulary of `vocabulary` tokens; rows from `vocabulary` on
    are padding. The shards of `group` hold each token once; they may differ in size, and one may be all padding.
    """

    group: ProcessGroup
    start: int
    vocabulary: int

    def without_padding(self, rows: Tensor) -> Tensor:
        """The first rows of this rank's weight or bias, those that belong to tokens."""
        tokens = max(0, self.vocabulary - self.start)
        return rows[:tokens] if tokens < len(rows) else rows  # a slice of everything would copy the gradient

    def mean_tokens(self) -> int:
        """Tokens of a rank on average: the same number on every rank of the group, rounded up."""
        return math.ceil(self.vocabulary / self.group.size())


class Softmax:
    """Of logits over the whole vocabulary."""

    normalizer: Tensor | None = None
    """What the backward pass has to be given: nothing."""

    def log_softmax(self, rows: slice, logits: Tensor, out: Tensor) -> None:
        """Write the log-probabilities of all tokens, from the logits of `rows`.

        torch's kernel for the CPU adds up a row's exponentials one after another: at 150k tokens log-probabilities
        come out 1e-5 off, all to one side. A sum of its own is exact to 1e-6, and then a vocabulary gives the same
        numbers whole and in shards.
        """
        if logits.device.type != "cpu":
            torch.log_softmax(logits, -1, out=out)
            return
        highest = logits.amax(-1, keepdim=True)
        log_sum = torch.sub(logits, highest, out=out).exp_().sum(-1, keepdim=True).log_()
        torch.sub(logits, highest, out=out).sub_(log_sum)

    def pick(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """The targets' own entries of `log_p`, a vector."""
        return log_p.gather(1, targets[:, None])[:, 0]

    def add_at_(self, grad: Tensor, targets: Tensor, values: Tensor) -> Tensor:
        """Add a value per row to the target's entry of `grad`, in place."""
        return grad.scatter_add_(1, targets[:, None], values[:, None])

    def sum_(self, values: Tensor) -> None:
        """Turn sums over this rank's tokens into sums over the vocabulary, in place."""


class ShardedSoftmax(Softmax):
    """Of logits over a shard's tokens: the whole vocabulary's normalizer, this rank's tokens.

    The forward pass reduces twice per chunk, `[rows of the chunk]` each, and keeps of each row the highest logit and
    log(sum(exp(logits - highest))). Given those, the backward pass needs the other ranks no more. (One number, their
    sum, would do, but loses the digits of the second where logits are large.)
    """

    normalizer: Tensor

    def __init__(self, shard: VocabularyShard, normalizer: Tensor, known: bool) -> None:
        """`normalizer` float32 `[2, all rows]`: filled by `log_softmax`, unless `known`."""
        self.normalizer, self._shard, self._known = normalizer, shard, known

    def log_softmax(self, rows: slice, logits: Tensor, out: Tensor) -> None:
        highest, log_sum = self.normalizer[:, rows]
        if not self._known:
            self._normalize(logits, highest, log_sum, scratch=out)
        torch.sub(logits, highest[:, None], out=out).sub_(log_sum[:, None])

    def pick(self, log_p: Tensor, targets: Tensor) -> Tensor:
        index, held = self._locate(targets, log_p.shape[1])
        if log_p.shape[1] == 0:  # a target out of range has to fail on every rank, or this one waits for the others
            log_p = log_p.new_zeros(len(log_p), 1)
        return super().pick(log_p, index).masked_fill(~held, 0)

    def add_at_(self, grad: Tensor, targets: Tensor, values: Tensor) -> Tensor:
        if grad.shape[1] == 0:
            return grad
        index, held = self._locate(targets, grad.shape[1])
        return super().add_at_(grad, index, values.masked_fill(~held, 0))

    def sum_(self, values: Tensor) -> None:
        if len(values) > 0:
            dist.all_reduce(values, group=self._shard.group)

    def _normalize(self, logits: Tensor, highest: Tensor, log_sum: Tensor, scratch: Tensor) -> None:
        """Fill in each row's highest logit and log(sum(exp(logits - highest))), over all shards."""
        if logits.shape[1] > 0:
            torch.amax(logits, -1, out=highest)
        else:
            highest.fill_(-math.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._shard.group)
        torch.sum(torch.sub(logits, highest[:, None], out=scratch).exp_(), -1, out=log_sum)
        dist.all_reduce(log_sum, group=self._shard.group)
        log_sum.log_()

    def _locate(self, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Each target's index among this rank's `tokens`, and whether it is held here; if not, its index is 0.

        A target outside the vocabulary has an index out of range, which is an error where it is used.
        """
        index = targets - self._shard.start
        held = (index >= 0) & (index < tokens)
        outside = (targets < 0) | (targets >= self._shard.vocabulary)
        return index.masked_fill(~held, 0).masked_fill(outside, -1), held
