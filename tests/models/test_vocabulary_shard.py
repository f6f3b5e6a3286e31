"""`linear_log_probs` of a vocabulary that ranks share, against plain log-softmax of all logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.models import VocabularyShard, head, linear_log_probs
from engines.testing.world import World
from support.largest_tensor import LargestTensor
from support.log_probs import objective, reference

ROWS, HIDDEN, VOCAB = 13, 8, 37

Shards = tuple[tuple[int, int], ...]  # of each rank: the first token, rows of the weight
LAYOUTS: dict[str, Shards] = {
    "2 ranks, padding": ((0, 20), (20, 20)),
    "2 ranks, uneven": ((0, 30), (30, 7)),
    "3 ranks, padding": ((0, 13), (13, 13), (26, 13)),
    "3 ranks, in another order": ((20, 17), (15, 5), (0, 15)),
    "3 ranks, one only padding": ((0, 19), (19, 19), (38, 19)),
    "1 rank, padding": ((0, 40),),
}


@dataclass(frozen=True)
class Case:
    """What is computed; the same on every rank."""

    shards: Shards
    bias: bool = False
    dtype: torch.dtype = torch.float32
    rows: int = ROWS
    uniform: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def need_entropy(self) -> bool:
        return bool(self.settings.get("need_entropy"))

    def problem(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Hidden states, weight, targets, bias. Quarters: logits are exact even in bfloat16."""
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randint(-2, 3, (self.rows, HIDDEN), generator=generator) / 2
        weight = torch.randint(-2, 3, (VOCAB, HIDDEN), generator=generator) / 2
        offsets = torch.randint(-8, 9, (VOCAB,), generator=generator) / 4 if self.bias else None
        targets = torch.randint(0, VOCAB, (self.rows,), generator=generator)
        targets[: len(self.shards)] = torch.tensor([min(start, VOCAB - 1) for start, _ in self.shards])[: self.rows]
        leaves = [None if x is None else x.to(self.dtype) for x in (hidden, weight, offsets)]
        return leaves[0], leaves[1], targets, leaves[2]

    def shard(self, full: Tensor | None) -> Tensor | None:
        """This rank's rows of the weight or the bias; padding is NaN, so that it shows wherever it takes part."""
        if full is None:
            return None
        start, rows = self.shards[dist.get_rank()]
        own = full[start : start + rows]
        padding = full.new_full((rows - len(own), *full.shape[1:]), float("nan"))
        return torch.cat([own, padding]).requires_grad_()


@dataclass
class Shared:
    """A rank's results."""

    log_probs: Tensor
    entropy: Tensor | None
    grads: tuple[Tensor, Tensor, Tensor | None]


class Collectives(TorchDispatchMode):
    """Name and size of every collective that is run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.seen.append((func._opname, sum(sizes)))
        return func(*args, **(kwargs or {}))


def this_shard(case: Case) -> VocabularyShard:
    return VocabularyShard(dist.group.WORLD, case.shards[dist.get_rank()][0], VOCAB)


def on_rank(case: Case) -> Shared:
    full_hidden, full_weight, targets, full_bias = case.problem()
    hidden, weight, bias = full_hidden.requires_grad_(), case.shard(full_weight), case.shard(full_bias)
    log_probs, entropy = linear_log_probs(hidden, weight, targets, bias, shard=this_shard(case), **case.settings)
    objective(log_probs, entropy, uniform=case.uniform).backward()
    grads = (hidden.grad, weight.grad, None if bias is None else bias.grad)
    return Shared(log_probs.detach(), None if entropy is None else entropy.detach(), grads)


def unshard(case: Case, parts: list[Tensor]) -> Tensor:
    """The whole weight's gradient from the ranks' own, whose padding must have none."""
    whole = torch.full((VOCAB, *parts[0].shape[1:]), float("nan"), dtype=parts[0].dtype)
    for (start, rows), part in zip(case.shards, parts, strict=True):
        tokens = max(0, min(rows, VOCAB - start))
        whole[start : start + tokens] = part[:tokens]
        assert part[tokens:].count_nonzero() == 0
    return whole


def check(case: Case, ranks: list[Shared], close: Callable[[Tensor, Tensor], None]) -> None:
    """The same results on all ranks, those of the reference; gradients of the ranks together are the reference's."""
    hidden, weight, targets, bias = case.problem()
    exact = [None if x is None else x.double().requires_grad_() for x in (hidden, weight, bias)]
    softcap, scale = case.settings.get("softcap"), case.settings.get("scale")
    log_probs, entropy = reference(exact[0], exact[1], targets, exact[2], softcap=softcap, scale=scale)
    objective(log_probs, entropy if case.need_entropy else None, uniform=case.uniform).backward()

    for rank in ranks:
        assert torch.equal(rank.log_probs, ranks[0].log_probs)
        torch.testing.assert_close(rank.log_probs.double(), log_probs.detach(), rtol=1e-5, atol=1e-6)
        if case.need_entropy:
            assert torch.equal(rank.entropy, ranks[0].entropy)
            torch.testing.assert_close(rank.entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-6)
        else:
            assert rank.entropy is None
    close(sum(rank.grads[0].double() for rank in ranks), exact[0].grad)
    close(unshard(case, [rank.grads[1] for rank in ranks]).double(), exact[1].grad)
    if case.bias:
        close(unshard(case, [rank.grads[2] for rank in ranks]).double(), exact[2].grad)


def nearly_exact(ours: Tensor, theirs: Tensor) -> None:
    largest = theirs.abs().max().item() if theirs.numel() > 0 else 0.0
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6 * max(1.0, largest))


def as_bfloat16(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


LOSSES = {
    "any weights": ({}, False),
    "equal weights": ({"equal_weights": True}, True),
    "equal weights that are not": ({"equal_weights": True}, False),
    "entropy": ({"need_entropy": True}, False),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk_rows", [1, 5, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_plain_log_softmax(
    world: Callable[[int], World], layout: str, chunk_rows: int | None, loss: str
) -> None:
    settings, uniform = LOSSES[loss]
    case = Case(LAYOUTS[layout], uniform=uniform, settings={**settings, "chunk_rows": chunk_rows})
    check(case, world(len(case.shards))(on_rank, case), nearly_exact)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("softcap", "scale"), [(2.0, None), (None, 0.3), (3.0, 1.7)])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_may_have_a_bias_and_scale_and_cap_logits(
    world: Callable[[int], World], softcap: float | None, scale: float | None, bias: bool, loss: str
) -> None:
    settings, uniform = LOSSES[loss]
    settings = {**settings, "chunk_rows": 5, "softcap": softcap, "scale": scale}
    case = Case(LAYOUTS["3 ranks, one only padding"], bias=bias, uniform=uniform, settings=settings)
    check(case, world(3)(on_rank, case), nearly_exact)


@pytest.mark.parametrize("need_entropy", [False, True])
def test_large_logits_do_not_overflow(world: Callable[[int], World], need_entropy: bool) -> None:
    settings = {"scale": 64.0, "need_entropy": need_entropy}  # logits of several hundred
    case = Case(LAYOUTS["3 ranks, padding"], settings=settings)
    check(case, world(3)(on_rank, case), nearly_exact)


@pytest.mark.parametrize("layout", ["2 ranks, padding", "3 ranks, one only padding"])
@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_computes_the_softmax_in_float32(world: Callable[[int], World], layout: str, loss: str) -> None:
    settings, uniform = LOSSES[loss]
    settings = {**settings, "chunk_rows": 5}
    case = Case(LAYOUTS[layout], bias=True, dtype=torch.bfloat16, uniform=uniform, settings=settings)
    ranks = world(len(case.shards))(on_rank, case)
    check(case, ranks, as_bfloat16)
    assert all(rank.log_probs.dtype == torch.float32 for rank in ranks)
    assert all(grad.dtype == torch.bfloat16 for rank in ranks for grad in rank.grads)


def without_rows(case: Case) -> tuple[Shared, list[tuple[str, int]]]:
    with Collectives() as collectives:
        return on_rank(case), collectives.seen


@pytest.mark.parametrize("loss", LOSSES)
def test_no_rows_give_an_empty_result_that_is_attached(world: Callable[[int], World], loss: str) -> None:
    case = Case(LAYOUTS["3 ranks, one only padding"], bias=True, rows=0, settings=LOSSES[loss][0])
    for result, collectives in world(3)(without_rows, case):
        assert result.log_probs.shape == (0,)
        assert [grad.count_nonzero() for grad in result.grads] == [0, 0, 0]
        assert collectives == []


def in_chunks_of_its_own(case: Case) -> tuple[Shared, int]:
    with mock.patch.object(head, "CHUNK_ELEMENTS", 40), Collectives() as collectives:
        return on_rank(case), len(collectives.seen)


def test_ranks_with_different_numbers_of_tokens_take_the_same_chunks(world: Callable[[int], World]) -> None:
    case = Case(LAYOUTS["2 ranks, uneven"])
    results = world(2)(in_chunks_of_its_own, case)
    check(case, [result for result, _ in results], nearly_exact)
    chunks = 5  # of 3 rows: with 19 tokens a rank, 13 rows fill 6 chunks of 40 logits
    assert [count for _, count in results] == [2 * chunks + 1] * 2


def largest_and_collectives(settings: dict[str, Any]) -> tuple[int, list[tuple[str, int]], list[tuple[str, int]]]:
    rows, hidden_size, tokens, size = 64, 4, 500, dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(tokens, hidden_size, requires_grad=True)
    targets = torch.randint(0, size * tokens, (rows,), generator=generator)
    shard = VocabularyShard(dist.group.WORLD, dist.get_rank() * tokens, size * tokens)
    with LargestTensor() as largest:
        with Collectives() as forward:
            outputs = linear_log_probs(hidden, weight, targets, shard=shard, chunk_rows=8, **settings)
        with Collectives() as backward:
            sum(output.sum() for output in outputs if output is not None).backward()
    return largest.numel, forward.seen, backward.seen


@pytest.mark.parametrize("settings", [{}, {"need_entropy": True}, {"equal_weights": True}])
def test_logits_are_neither_held_for_all_rows_nor_gathered(
    world: Callable[[int], World], settings: dict[str, Any]
) -> None:
    for largest, forward, backward in world(2)(largest_and_collectives, settings):
        assert largest == 2 * 8 * 500
        outputs = 2 if settings.get("need_entropy") else 1
        assert forward == [("allreduce_", 8)] * (2 * 64 // 8) + [("allreduce_", 64)] * outputs
        assert backward == []


def with_a_target_outside(case: Case, target: int) -> str:
    hidden, weight, targets, _ = case.problem()
    targets[1] = target
    with pytest.raises((IndexError, RuntimeError)) as error:
        linear_log_probs(hidden, case.shard(weight), targets, shard=this_shard(case), chunk_rows=1)
    return str(error.value)


@pytest.mark.parametrize("target", [-100, VOCAB, 38])
def test_a_target_outside_the_vocabulary_fails_on_every_rank(world: Callable[[int], World], target: int) -> None:
    case = Case(LAYOUTS["3 ranks, one only padding"])
    assert all("out of bounds" in message for message in world(3)(with_a_target_outside, case, target))


def with_nan_on_the_last_rank(case: Case) -> tuple[Tensor, Tensor]:
    hidden, weight, targets, _ = case.problem()
    own = case.shard(weight).detach()
    if dist.get_rank() == dist.get_world_size() - 1:
        own[0] = float("nan")
    return linear_log_probs(hidden, own, targets, shard=this_shard(case), need_entropy=True)


def test_nan_of_one_rank_shows_on_all(world: Callable[[int], World]) -> None:
    for log_probs, entropy in world(3)(with_nan_on_the_last_rank, Case(LAYOUTS["3 ranks, padding"])):
        assert log_probs.isnan().all()
        assert entropy.isnan().all()


def with_impossible_tokens(case: Case) -> tuple[Shared, bool]:
    hidden, weight, targets, bias = case.problem()
    bias[13:26] = float("-inf")
    targets[(targets >= 13) & (targets < 26)] = 0
    hidden, own, own_bias = hidden.requires_grad_(), case.shard(weight), case.shard(bias)
    settings = {"shard": this_shard(case), "need_entropy": True}
    log_probs, entropy = linear_log_probs(hidden, own, targets, own_bias, **settings)
    (log_probs.sum() + entropy.sum()).backward()
    grads = (hidden.grad, own.grad, own_bias.grad)
    return Shared(log_probs.detach(), entropy.detach(), grads), all(bool(x.isfinite().all()) for x in grads)


def test_tokens_that_cannot_occur_add_nothing_to_the_entropy(world: Callable[[int], World]) -> None:
    case = Case(LAYOUTS["3 ranks, padding"], bias=True)  # the second rank has none that can occur
    hidden, weight, _, bias = case.problem()
    bias[13:26] = float("-inf")
    log_p = (hidden @ weight.T + bias).log_softmax(-1)
    entropy = -torch.where(log_p.isfinite(), log_p.exp() * log_p, 0).sum(-1)
    for result, finite in world(3)(with_impossible_tokens, case):
        torch.testing.assert_close(result.entropy, entropy)
        assert finite
