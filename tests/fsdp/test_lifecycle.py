"""What an engine holds while it lives, and what is left when it is closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from engines.testing.samples import mini_batches
from support.fsdp2 import Spy, fsdp2, share, train_step

HYBRID = {"data_parallel_replicate_size": 2}


def outlive(folder: Path) -> tuple[Any, Any]:
    first, second, _ = mini_batches()
    with ExitStack() as stack:
        other = stack.enter_context(fsdp2(folder, HYBRID))
        survivor = stack.enter_context(fsdp2(folder, HYBRID))
        train_step(other, second)
        expected = train_step(other, first)
        other.close()
        train_step(survivor, second)
        return expected, train_step(survivor, first)


def test_an_engine_outlives_another_of_its_layout(world: Any, folder: Callable[[str], Path]) -> None:
    """The second of two, whose tensors torch's caches would lay out on the first one's mesh."""
    for expected, found in world(2)(outlive, folder("llama")):
        assert found == expected


def infer(folder: Path, settings: dict[str, Any]) -> None:
    spy = Spy()
    with fsdp2(folder, settings, wrappers=[spy]) as engine:
        outputs = engine.infer_batch(share(engine, mini_batches()[0]), needs=["log_probs", "entropy"]).outputs
        assert not outputs.log_probs.requires_grad
        assert not outputs.entropy.requires_grad
        assert all(isinstance(parameter, DTensor) for parameter in spy.model.parameters())
        assert all(parameter.grad is None for parameter in spy.model.parameters())


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}], ids=str)
def test_inference_leaves_only_shards(settings: dict[str, Any], world: Any, folder: Callable[[str], Path]) -> None:
    world(2)(infer, folder("llama"), settings)
