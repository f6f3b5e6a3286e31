"""Auxiliary losses of routers against transformers' formula and sums written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from engines.models.auxiliary import RoutingSums

ROWS, EXPERTS = 23, 6


def routed(top_k: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    logits = logits.float().requires_grad_()
    return logits, torch.zeros_like(logits).scatter(1, logits.topk(top_k).indices, 1).bool()


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_transformers(top_k: int, padded: bool) -> None:
    logits, chosen = routed(top_k)
    real = torch.arange(ROWS) % 3 > 0 if padded else None
    ours = RoutingSums.of(logits, chosen, real).load_balancing_loss
    mask = None if real is None else real.long()[None]
    # transformers' fractions of rows sum to top_k over the experts, ours to 1
    theirs = load_balancing_loss_func((logits,), EXPERTS, top_k, mask) / top_k
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads)


def test_z_loss_by_hand() -> None:
    logits, chosen = routed(2)
    real = torch.arange(ROWS) % 3 > 0
    rows = [row for row, counts in zip(logits.tolist(), real.tolist(), strict=True) if counts]
    expected = sum(math.log(sum(math.exp(z) for z in row)) ** 2 for row in rows) / len(rows)
    assert float(RoutingSums.of(logits, chosen, real).z_loss.detach()) == pytest.approx(expected, rel=1e-6)


def test_even_load_is_one() -> None:
    chosen = torch.eye(EXPERTS, dtype=torch.bool)
    assert float(RoutingSums.of(torch.zeros(EXPERTS, EXPERTS), chosen).load_balancing_loss) == pytest.approx(1)


def test_shards_add_up() -> None:
    logits, chosen = routed(2)
    whole = RoutingSums.of(logits, chosen)
    shards = [RoutingSums.of(*shard) for shard in zip(logits.split(9), chosen.split(9), strict=True)]
    every = RoutingSums.unflat(torch.stack([shard.flat() for shard in shards]).sum(0))
    for name in ("rows", "counts", "probabilities", "squares", "load_balancing_loss", "z_loss"):
        torch.testing.assert_close(getattr(every, name), getattr(whole, name).detach())
    parts = [replace(every, probabilities=shard.probabilities).load_balancing_loss for shard in shards]
    torch.testing.assert_close(sum(parts), whole.load_balancing_loss)
    grads = [
        torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (sum(parts), whole.load_balancing_loss)
    ]
    torch.testing.assert_close(*grads)


def test_without_any_row() -> None:
    logits, chosen = routed(2)
    none = RoutingSums.of(logits, chosen, torch.zeros(ROWS, dtype=torch.bool))
    for loss in (none.load_balancing_loss, none.z_loss):
        assert float(loss.detach()) == 0
        assert (torch.autograd.grad(loss, logits, retain_graph=True)[0] == 0).all()
