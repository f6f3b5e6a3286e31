"""Rows of a rank against a plain walk over the sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.batch import Batch
from engines.testing.world import World
from engines_megatron.runtime.cpu import install

install()

from engines_megatron.rows import Rows, row_count  # noqa: E402

LENGTHS = [5, 1, 16, 2, 2, 9]
LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (2, 5), (4, 1), (4, 8)]
"""(context-parallel size, tensor-parallel size under sequence parallelism)"""
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


class Group:
    """A process group as far as rows are cut, without any process."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def batch(lengths: list[int] = LENGTHS, *, loss_mask: bool = True) -> Batch:
    """Every token's id is its place in the batch plus 100; odd ids are targets."""
    ids = torch.arange(100, 100 + sum(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return Batch(cu, {"input_ids": ids, **({"loss_mask": ids % 2 == 1} if loss_mask else {})})


def rows_of(batch: Batch, size: int, rank: int, tensor: int) -> Rows:
    group: Any = Group(size, rank) if size > 1 else None
    return Rows.of(batch, context=group, tensor=tensor)


def test_one_rank_without_padding() -> None:
    rows = rows_of(batch([3, 1, 2]), 1, 0, 1)
    assert rows.input_ids.tolist() == [[100, 101, 102, 103, 104, 105]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert rows.targets.tolist() == [101, 102, -1, -1, 105, -1]
    assert rows.is_target.tolist() == [True, False, False, False, True, False]
    assert not rows.padding_mask.any()
    assert rows.packed.lengths == (3, 1, 2)
    assert rows.packed.cu_seqlens_q.tolist() == rows.packed.cu_seqlens_kv.tolist() == [0, 3, 4, 6]
    assert rows.packed.cu_seqlens_q.dtype == torch.int32
    assert rows.packed.max_seqlen_q == rows.packed.max_seqlen_kv == 3
    assert rows.packed.qkv_format == "thd"


def test_two_ranks_by_hand() -> None:
    # padded to 8, 4 and 4; chunks of 2, 1 and 1 rows
    whole = batch([7, 2, 3], loss_mask=False)
    first, second = (rows_of(whole, 2, rank, 1) for rank in range(2))
    assert first.input_ids.tolist() == [[100, 101, 106, 0, 107, 0, 109, 0]]
    assert second.input_ids.tolist() == [[102, 103, 104, 105, 108, 0, 110, 111]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3, 0, 3]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5, 1, 2, 1, 2]]
    assert first.targets.tolist() == [101, 102, -1, -1, 108, -1, 110, -1]
    assert second.targets.tolist() == [103, 104, 105, 106, -1, -1, 111, -1]
    assert first.padding_mask.tolist() == [[False, False, False, True, False, True, False, True]]
    assert first.is_target.tolist() == [True, True, False, False, True, False, True, False]
    assert first.packed.lengths == second.packed.lengths == (8, 4, 4)


@pytest.mark.parametrize(("size", "tensor"), LAYOUTS)
def test_every_token_has_one_row(size: int, tensor: int) -> None:
    whole = batch()
    ranks = [rows_of(whole, size, rank, tensor) for rank in range(size)]
    count = row_count(LENGTHS, size, tensor)
    found = []
    for rows in ranks:
        assert rows.input_ids.shape == rows.position_ids.shape == rows.padding_mask.shape == (1, count)
        assert rows.targets.shape == rows.is_target.shape == (count,)
        assert count % tensor == 0
        assert sum(rows.packed.lengths) == size * count
        found += [
            (token, place, target, is_target)
            for token, place, target, is_target, padding in zip(
                rows.input_ids[0].tolist(),
                rows.position_ids[0].tolist(),
                rows.targets.tolist(),
                rows.is_target.tolist(),
                rows.padding_mask[0].tolist(),
                strict=True,
            )
            if not padding
        ]
        assert (rows.targets[rows.padding_mask[0]] == -1).all()
        assert not rows.is_target[rows.padding_mask[0]].any()
    expected, token = [], 100
    for length in LENGTHS:
        for place in range(length):
            target = token + 1 if place + 1 < length else -1
            expected.append((token, place, target, target % 2 == 1 and target > 0))
            token += 1
    assert sorted(found) == expected


def test_a_filler_is_masked_out() -> None:
    filler = Batch.filler(batch())
    for size, tensor in LAYOUTS:
        rows = rows_of(filler, size, 0, tensor)
        assert rows.padding_mask.all()
        assert not rows.is_target.any()


def answers(whole: Batch, tensor: int, weights: list[float]) -> list[torch.Tensor]:
    """On each rank: what is gathered of rows that say their own id, and the gradients of both outputs."""
    import torch.distributed as dist

    from engines_megatron.runtime.cpu import install

    install()
    from engines_megatron.rows import Rows

    rows = Rows.of(whole, context=dist.group.WORLD, tensor=tensor)
    values = rows.input_ids[0].float().masked_fill(rows.padding_mask[0], float("nan")).requires_grad_()
    gathered, last = rows.gather(values), rows.last(values)
    target_weights, last_weights = torch.tensor(weights).split([whole.num_tokens, len(whole)])
    grads = [
        torch.autograd.grad((out * weight).sum(), values, retain_graph=True)[0]
        for out, weight in ((gathered, target_weights), (last, last_weights))
    ]
    return [gathered.detach(), last.detach(), *grads, rows.input_ids[0]]


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_come_back_in_packed_order(world: Callable[[int], World], size: int, tensor: int) -> None:
    whole = batch()
    starts, ends = whole.cu_seqlens[:-1], whole.cu_seqlens[1:]
    expected = whole["input_ids"].float() - 1  # the row before says its own id
    expected[starts] = 0
    weights = torch.arange(1.0, whole.num_tokens + len(whole) + 1)
    to_tokens = torch.zeros(whole.num_tokens)  # each token's gradient: the weight of what its row says
    to_tokens[:-1] = weights[1 : whole.num_tokens]
    to_tokens[ends - 1] = 0
    to_last = torch.zeros(whole.num_tokens)
    to_last[ends - 1] = weights[whole.num_tokens :]
    summed = torch.zeros(2, whole.num_tokens)
    for gathered, last, *grads, ids in world(size)(answers, whole, tensor, weights.tolist()):
        assert torch.equal(gathered, expected)
        assert torch.equal(last, whole["input_ids"][ends - 1].float())
        for total, grad in zip(summed, grads, strict=True):
            assert (grad[ids == 0] == 0).all()
            total.index_add_(0, ids[ids > 0] - 100, grad[ids > 0])
    assert torch.equal(summed, torch.stack([to_tokens, to_last]))


@pytest.mark.parametrize(
    ("context", "tensor", "count"),
    [(1, 1, 8), (1, 3, 9), (2, 1, 6), (2, 4, 8), (2, 5, 10), (2, 7, 14), (4, 1, 4), (4, 3, 6)],
)
def test_row_count(context: int, tensor: int, count: int) -> None:
    assert row_count([5, 3], context, tensor) == count


@given(lengths, lengths, st.integers(1, 4), st.integers(1, 5))
def test_row_count_is_monotone_and_subadditive(some: list[int], more: list[int], context: int, tensor: int) -> None:
    def count(lengths: list[int]) -> int:
        return row_count(lengths, context, tensor)

    assert count(some) <= count(some + more) <= count(some) + count(more)
    assert count(some) <= count([some[0] + 1, *some[1:]])
    assert sum(some) <= context * count(some)
