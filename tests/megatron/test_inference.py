"""Inference: right on every rank, and without a trace in weights, gradients, modes and random states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.losses import SFTLoss
from engines.testing.runs import same_bits
from engines.testing.samples import mini_batches
from engines.testing.world import World
from support.engine import share, train_step, weights
from support.megatron import LAYOUTS
from support.megatron_engine import Chunks, megatron, process_wide

Worlds = Callable[[int], World]
Deep = Callable[..., Path]

FIRST, SECOND, _ = mini_batches()


def state(chunks: Chunks) -> dict[str, Any]:
    """Everything of an engine that inference could change, in a form that can be compared."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tensors = [t.clone() for _, p in chunks.parameters() for t in (p.data, p.main_grad)]
    return {
        "tensors": [tensor.tolist() for tensor in tensors],
        "training": [m.training for _, chunk in sorted(chunks.by_index.items()) for m in chunk.modules()],
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "tracker": {name: value.tolist() for name, value in get_cuda_rng_tracker().get_states().items()},
    }


def infer_between(folder: Path, layout: str) -> None:
    """Between the gradients of a step and the step; against an engine that doesn't infer at all."""
    engine_settings = {"micro_batch_size": 2, "moe_aux_loss_coefficient": 0.1} if "moe" in folder.name else {}
    results = []
    for inferring in (True, False):
        with megatron(folder, layout, engine_settings, wrappers=[chunks := Chunks()]) as engine:
            if inferring:
                engine.infer_batch(share(engine, SECOND))
            train_step(engine, FIRST)
            with engine.train_mode():
                engine.forward_backward(share(engine, SECOND), SFTLoss())
                if inferring:
                    before, held = state(chunks), process_wide()
                    engine.infer_batch(share(engine, FIRST), needs=["log_probs", "entropy"], loss=SFTLoss())
                    assert state(chunks) == before
                    assert {**process_wide(), "cached rotary embeddings": 0, "auxiliary scale": 0} == {
                        **held,
                        "cached rotary embeddings": 0,
                        "auxiliary scale": 0,
                    }
                    assert all(before["training"]) and torch.is_grad_enabled()
            results.append((engine.optimizer_step(), weights(engine)))
    assert results[0][0] == results[1][0] and same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_moe", "tp2 sp", marks=pytest.mark.more),
        ("llama_tied", "pp2 vpp2"),
        pytest.param("llama", "pp2 dp2 distributed", marks=pytest.mark.more),
    ],
)
def test_inference_leaves_no_trace(family: str, layout: str, world: Worlds, deep: Deep) -> None:
    world(LAYOUTS[layout].processes)(infer_between, deep(family), layout)
