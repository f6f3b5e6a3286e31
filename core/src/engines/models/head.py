"""A language model's head, chunk of rows by chunk of rows: logits from hidden states, and gradients back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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


class HeadGradients:
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
