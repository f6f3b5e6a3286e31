"""`model.dtype: bfloat16` computes in bfloat16 over float32 parameters, gradients and reductions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.losses import SFTLoss
from engines.testing.samples import mini_batches
from support.bfloat16 import distance, reference_step
from support.fsdp2 import Spy, fsdp2, share, train_step, weights


def step_in_bfloat16(folder: Path, settings: dict[str, Any]) -> tuple[float, dict[str, Tensor], set[torch.dtype]]:
    spy = Spy()
    with fsdp2(folder, {"micro_batch_size": 1, **settings}, dtype="bfloat16", wrappers=[spy]) as engine:
        loss = engine.forward_backward(share(engine, mini_batches()[0]), SFTLoss())["loss"]
        named = dict(spy.model.model.named_parameters())
        dtypes = {tensor.dtype for p in named.values() for tensor in (p, p.grad)}
        return loss, {name: p.grad.full_tensor() for name, p in named.items()}, dtypes


def test_is_as_close_to_float32_as_plain_bfloat16(world: Any, folder: Callable[[str], Path]) -> None:
    loss, plain = reference_step(folder("llama"), torch.bfloat16)
    exact_loss, exact = reference_step(folder("llama"), torch.float32)
    found_loss, found, dtypes = world(1)(step_in_bfloat16, folder("llama"), {})[0]
    assert dtypes == {torch.float32}, "parameters and gradients"
    assert abs(found_loss - exact_loss) < 3 * abs(loss - exact_loss)
    assert 0.5 < distance(found, exact) / distance(plain, exact) < 1.2


@pytest.mark.parametrize(
    "settings", [{}, {"data_parallel_replicate_size": 2}, {"accumulate_gradients": "sharded"}], ids=str
)
def test_sums_over_micro_batches_and_ranks_are_float32(
    settings: dict[str, Any], world: Any, folder: Callable[[str], Path]
) -> None:
    """Each sample's gradient is the same wherever it is computed, and its sum with others loses nothing."""
    loss, expected, _ = world(1)(step_in_bfloat16, folder("llama"), {})[0]
    for found_loss, found, dtypes in world(2)(step_in_bfloat16, folder("llama"), settings):
        assert dtypes == {torch.float32}
        assert found_loss == pytest.approx(loss, rel=1e-7)
        assert distance(found, expected) < 1e-6


def tiny_steps(folder: Path) -> tuple[dict[str, Tensor], set[torch.dtype], set[torch.dtype]]:
    spy = Spy()
    optimizer = {"lr": 1e-5, "eps": 1e-8}
    with fsdp2(folder, dtype="bfloat16", optimizer=optimizer, wrappers=[spy]) as engine:
        for _ in range(2):
            train_step(engine, mini_batches()[0])
        full = {name: p.detach().full_tensor() for name, p in spy.model.model.named_parameters()}
        exported = weights(engine)
        return full, {t.dtype for t in full.values()}, {t.dtype for t in exported.values()}


def test_small_updates_are_kept_and_exports_are_bfloat16(world: Any, folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    before = dict(AutoModelForCausalLM.from_pretrained(folder("llama")).named_parameters())
    for after, held, exported in world(2)(tiny_steps, folder("llama")):
        assert (held, exported) == ({torch.float32}, {torch.bfloat16})
        norm = "model.norm.weight"  # near 1, where bfloat16 can't move by 2e-5
        moved = (after[norm] - before[norm].detach()).abs()
        assert float(moved.min()) > 0
        assert float(moved.max()) < 3e-5
