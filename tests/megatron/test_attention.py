"""Packed core attention, on one rank and across context-parallel ones, against attention by the textbook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.testing.world import World

SIZE = 8
SCALE = 0.3
LENGTHS = [16, 16, 8, 32, 8, 8, 40]
"""Multiples of 2 * 4, neighbours of equal length among them."""


def qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), count, SIZE) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def output_weights(heads: int) -> Tensor:
    shape = (sum(LENGTHS), heads, SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def reference(parts: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of its weighted sum in query, key and value."""
    leaves = [part.double().requires_grad_() for part in parts]
    outputs = []
    groups = leaves[0].shape[1] // leaves[1].shape[1]
    every_head = [leaves[0], *(leaf.repeat_interleave(groups, 1) for leaf in leaves[1:])]
    for q, k, v in zip(*(part.split(LENGTHS) for part in every_head), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v))
    out = torch.cat(outputs)
    return [out.detach(), *torch.autograd.grad((out * output_weights(out.shape[1])).sum(), leaves)]


def places(size: int, rank: int) -> Tensor:
    """Where a rank's rows lie in the whole: the chunks `rank` and `2 * size - 1 - rank` of each sequence."""
    found, start = [], 0
    for length in LENGTHS:
        chunks = torch.arange(start, start + length).chunk(2 * size)
        found += [chunks[rank], chunks[2 * size - 1 - rank]]
        start += length
    return torch.cat(found)


def attend(parts: list[Tensor], weights: Tensor, lengths: list[int], recompute: bool) -> list[Tensor]:
    """On each rank: the output of its rows, and the gradients."""
    import torch.distributed as dist

    from engines_megatron.runtime.cpu import install

    install()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from engines_megatron.model.attention import PackedCoreAttention
    from engines_megatron.rows import Packed

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    groups = ProcessGroupCollection()
    groups.cp = dist.group.WORLD
    attention: Any = PackedCoreAttention(
        config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE, pg_collection=groups
    )
    held = places(dist.get_world_size(), dist.get_rank())
    leaves = [part[held].requires_grad_() for part in parts]
    packed = Packed(qkv_format="thd", lengths=tuple(lengths))

    def run(*rows: Tensor) -> Tensor:
        return attention(*rows, None, packed_seq_params=packed)

    out = checkpoint(run, False, *leaves) if recompute else run(*leaves)
    grads = torch.autograd.grad((out * weights[held]).sum(), leaves) if not recompute else None
    if grads is None:  # Megatron's checkpoint wants a plain backward
        (out * weights[held]).sum().backward()
        grads = tuple(leaf.grad for leaf in leaves)
    return [out.detach(), *grads]


def whole(answers: list[list[Tensor]]) -> list[Tensor]:
    """Each rank's rows put into their places."""
    order = torch.cat([places(len(answers), rank) for rank in range(len(answers))])
    return [torch.cat(list(parts))[order.argsort()] for parts in zip(*answers, strict=True)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_equals_each_sequence_alone(
    world: Callable[[int], World], size: int, heads: int, kv_heads: int, recompute: bool
) -> None:
    parts = qkv(heads, kv_heads)
    answers = world(size)(attend, parts, output_weights(heads), LENGTHS, recompute)
    for ours, theirs in zip(whole(answers), reference(parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2])
def test_low_precision_stays_low(world: Callable[[int], World], size: int) -> None:
    parts = qkv(4, 2, torch.bfloat16)
    answers = world(size)(attend, parts, output_weights(4), LENGTHS, False)
    for ours, theirs in zip(whole(answers), reference(parts), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05)
