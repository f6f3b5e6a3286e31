"""Gradients are sums over ranks, and are reduced as seldom as the settings allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.contract import hookimpl
from engines.losses import SFTLoss
from engines.testing.plain import sum_of_cross_entropies
from engines.testing.samples import mini_batches
from support.fsdp2 import Spy, fsdp2, share

LAYERS = 2
GROUPS = LAYERS + 1
"""Communication groups of the tiny models: every layer and the root."""
HYBRID = {"data_parallel_replicate_size": 2}


def gradients(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    spy = Spy()
    with fsdp2(folder, settings, wrappers=[spy]) as engine:
        engine.forward_backward(share(engine, mini_batches()[0]), SFTLoss())
        return {name: p.grad.full_tensor() for name, p in spy.model.model.named_parameters()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 1},
        {"micro_batch_size": 1, "accumulate_gradients": "sharded"},
        {"data_parallel_replicate_size": 2, "micro_batch_size": 1},
        {"data_parallel_replicate_size": 2, "micro_batch_size": 1, "accumulate_gradients": "sharded"},
    ],
    ids=str,
)
def test_gradients_are_sums(settings: dict[str, Any], world: Any, folder: Callable[[str], Path]) -> None:
    """Of 4 ranks, sharded or replicated: an average would be a quarter, and one group left out would show."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder("llama"), attn_implementation="eager")
    samples = mini_batches()[0]
    targets = sum(sample.num_targets for sample in samples)
    for sample in samples:
        (sum_of_cross_entropies(model, sample) / targets).backward()
    for found in world(4)(gradients, folder("llama"), settings):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


class Collectives(TorchDispatchMode):
    """Counts the collectives that are started inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class CountCollectives:
    """Counts those of forwards and backwards, not core's agreement before them."""

    counts: Counter[str]

    @hookimpl(wrapper=True)
    def forward_backward_batch(self) -> Iterator[None]:
        with Collectives() as collectives:
            result = yield
        self.counts = collectives.counts
        return result


def collectives(folder: Path, settings: dict[str, Any]) -> Counter[str]:
    wrapper = CountCollectives()
    with fsdp2(folder, {"micro_batch_size": 1, **settings}, wrappers=[wrapper]) as engine:
        engine.forward_backward(share(engine, mini_batches()[0]), SFTLoss())
        return wrapper.counts


@pytest.mark.parametrize(
    ("settings", "all_gathers", "reduce_scatters", "all_reduces"),
    [
        ({}, 2 * (GROUPS + LAYERS), GROUPS, 0),
        ({"reshard_after_forward": False}, 2 * GROUPS, GROUPS, 0),
        ({"accumulate_gradients": "sharded"}, 2 * (GROUPS + LAYERS), 2 * GROUPS, 0),
        ({**HYBRID}, 2 * (GROUPS + LAYERS), GROUPS, GROUPS),
        ({**HYBRID, "accumulate_gradients": "sharded"}, 2 * (GROUPS + LAYERS), 2 * GROUPS, GROUPS),
    ],
    ids=str,
)
def test_collectives_of_two_micro_batches(
    settings: dict[str, Any],
    all_gathers: int,
    reduce_scatters: int,
    all_reduces: int,
    world: Any,
    folder: Callable[[str], Path],
) -> None:
    """The root is gathered once a micro-batch, a layer once more for its backward; reductions come at the end."""
    for counts in world(4)(collectives, folder("llama"), settings):
        assert counts == Counter(
            _allgather_base_=all_gathers, _reduce_scatter_base_=reduce_scatters, allreduce_=all_reduces
        )
