"""Attention over packed sequences, as an attention implementation of transformers.

A packed row `[1, total_tokens]` holds sequences one after another; each attends to itself alone, with torch's
`scaled_dot_product_attention` and `is_causal`, so that no mask over the row is ever built. The boundaries travel
as the keyword argument `packing` from the backbone's call down to this function: a recomputation under
activation checkpointing, or another micro-batch in flight, always sees its own.

Follows transformers' convention for flash attention: `sliding_window`, `softcap` and `s_aux` (sinks) arrive as
keyword arguments and the mask is None. What cannot be honoured is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention, softmax

from engines.errors import ModelError

NAME = "engines_packed"
"""The `attn_implementation` under which transformers finds `packed_attention`."""


@dataclass(frozen=True)
class Packing:
    """Boundaries of a packed row: runs of neighbouring sequences that are equally long, as (count, length).

    Sequences of one run are computed in one call.
    """

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Packing:
        """The packing of sequences with these lengths, in this order."""
        return cls(tuple((len(list(run)), length) for length, run in groupby(lengths)))


def register() -> None:
    """Make `packed_attention` known to transformers; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each packed sequence to itself.

    `query` `[1, heads, T, d]`, `key` and `value` `[1, kv_heads, T, d]`; returns `[1, T, heads, d]`. Called by
    transformers in every attention layer, also while a checkpointed layer is recomputed. Raises `ModelError`
    where the model asks for another kind of attention.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    _refuse(module, attention_mask, packing, causal, position_bias)
    assert packing is not None
    rule = _Rule(scaling if scaling is not None else query.shape[-1] ** -0.5, dropout, sliding_window, softcap, s_aux)
    sizes = [count * length for count, length in packing.runs]
    outputs = []
    for (count, length), *row in zip(
        packing.runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True
    ):
        q, k, v = (part[0].unflatten(1, (count, length)).transpose(0, 1) for part in row)
        out = _plain(q, k, v, None, rule) if rule.is_plain(length) else _by_blocks(q, k, v, rule)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


@dataclass(frozen=True)
class _Rule:
    """What a layer asks of its attention beyond causality."""

    scaling: float
    dropout: float
    window: int | None
    """Keys that a query sees, itself included."""
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_written_out(self) -> bool:
        """Whether torch's kernel lacks it: capped scores (Gemma 2), sinks (gpt-oss)."""
        return self.softcap is not None or self.sinks is not None

    def is_plain(self, length: int) -> bool:
        """Whether a sequence of this length is all causal softmax attention."""
        return not self.is_written_out and (self.window is None or length <= self.window)


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, rule: _Rule) -> Tensor:
    """Attention `[n, heads, length, d]` by torch's kernel, causal unless a mask says what is visible."""
    return scaled_dot_product_attention(
        q,
        k,
        v,
        visible,
        dropout_p=rule.dropout,
        is_causal=visible is None,
        scale=rule.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> Tensor:
    """Causal attention `[n, heads, length, d]` in blocks of queries; with a window a block gets only its keys."""
    length = q.shape[2]
    window = min(rule.window or length, length)
    size = max(window, 128)
    attend = _written_out if rule.is_written_out else _plain
    outputs = []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window + 1)
        places = torch.arange(first, stop, device=q.device)
        distance = places[start - first :, None] - places
        visible = (distance >= 0) & (distance < window)
        outputs.append(attend(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], visible, rule))
    return torch.cat(outputs, 2)


def _written_out(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, rule: _Rule) -> Tensor:
    """Softmax attention step by step, float32 in the softmax, as transformers' eager attention."""
    groups = q.shape[1] // k.shape[1]
    scores = q.unflatten(1, (k.shape[1], groups)) @ k[:, :, None].transpose(-1, -2) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if rule.sinks is not None:
        sink = rule.sinks.to(scores).view(1, k.shape[1], groups, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    if rule.sinks is not None:
        weights = weights[..., :-1]  # a sink takes probability and gives nothing
    return (drop(weights, rule.dropout) @ v[:, :, None]).flatten(1, 2)


def _refuse(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    packing: Packing | None,
    causal: bool,
    position_bias: Tensor | None,
) -> None:
    name = type(module).__name__
    if packing is None:
        raise ModelError(
            f"{name} got no sequence boundaries: this architecture does not hand keyword arguments down to its "
            "attention, so packed sequences would see each other. It cannot be trained here."
        )
    if not causal:
        raise ModelError(f"{name} is not causal; only causal language models can be trained here")
    if attention_mask is not None or position_bias is not None:
        raise ModelError(
            f"{name} uses an attention mask or position bias of its own, which packed attention does not have"
        )


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers' hook for building masks: none is needed."""
