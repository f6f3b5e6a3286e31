"""Packed attention against attention with an explicit mask, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.errors import ModelError
from engines.models.attention import Packing, packed_attention
from support.largest_tensor import LargestTensor

LENGTHS = [3, 3, 1, 20, 1, 1, 300, 6, 7]


class Layer(nn.Module):
    is_causal = True


def qkv(heads: int, kv_heads: int, *, total: int = sum(LENGTHS), size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, total, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One sequence `[heads, length, d]`, by the textbook."""
    groups = len(q) // len(k)
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.shape[1])
    distance = place[:, None] - place
    hidden = (distance < 0) | (distance >= (window or q.shape[1]))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return scores.softmax(-1)[..., : q.shape[1]] @ v


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_attention_of_each_sequence_alone(
    heads: int, kv_heads: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    leaves = qkv(heads, kv_heads)
    sinks = torch.linspace(-1, 2, heads, dtype=torch.float64).requires_grad_() if with_sinks else None
    if sinks is not None:
        leaves.append(sinks)
    out, _ = packed_attention(
        Layer(),
        *leaves[:3],
        None,
        packing=Packing.of(LENGTHS),
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    parts = [
        reference(*(x[0] for x in row), window=window, softcap=softcap, sinks=sinks).transpose(0, 1)
        for row in zip(*(x.split(LENGTHS, 2) for x in leaves[:3]), strict=True)
    ]
    want = torch.cat(parts)[None]
    # the written-out softmax is float32, as in transformers
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    ours = torch.autograd.grad((out * weights).sum(), leaves)
    theirs = torch.autograd.grad((want * weights).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_neighbours_of_equal_length_are_one_run() -> None:
    assert Packing.of(LENGTHS).runs == ((2, 3), (1, 1), (1, 20), (2, 1), (1, 300), (1, 6), (1, 7))


@pytest.mark.parametrize("window", [None, 8])
def test_no_mask_over_the_row_is_ever_built(window: int | None) -> None:
    lengths = [32] * 40
    leaves = [x.detach().float() for x in qkv(2, 2, total=sum(lengths))]
    with LargestTensor() as largest:
        packed_attention(Layer(), *leaves, None, packing=Packing.of(lengths), sliding_window=window)
    assert largest.numel < sum(lengths) ** 2 / 10


def test_a_long_sequence_under_a_short_window_takes_linear_memory() -> None:
    leaves = [x.detach().float() for x in qkv(1, 1, total=4096)]
    with LargestTensor() as largest:
        packed_attention(Layer(), *leaves, None, packing=Packing.of([4096]), sliding_window=16)
    assert largest.numel <= 4096 * 16


def test_dropout_drops() -> None:
    leaves = [x.detach() for x in qkv(2, 2)]
    for softcap in (None, 50.0):
        outs = [
            packed_attention(Layer(), *leaves, None, packing=Packing.of(LENGTHS), dropout=p, softcap=softcap)[0]
            for p in (0.0, 0.0, 0.5)
        ]
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no sequence boundaries"),
        ({"packing": Packing.of(LENGTHS), "is_causal": False}, "not causal"),
        ({"packing": Packing.of(LENGTHS), "position_bias": torch.zeros(1)}, "position bias"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        packed_attention(Layer(), *qkv(2, 2), None, **arguments)
    encoder = Layer()
    encoder.is_causal = False
    with pytest.raises(ModelError, match="not causal"):
        packed_attention(encoder, *qkv(2, 2), None, packing=Packing.of(LENGTHS))
