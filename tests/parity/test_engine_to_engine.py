"""What one engine has trained, the other goes on with: by checkpoint and by export, both ways, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.testing.runs import OPTIMIZER, pack, same_bits, weights_of
from engines.testing.samples import mini_batches
from engines.worker import TrainingWorker
from support.megatron import LAYERS, LAYOUTS, settings

FSDP2 = {"strategy": "fsdp2", "device": "cpu"}
LOG_PROBS = 2e-5
"""Largest difference of a token's log-probability; float32 forwards of the two engines differ by some 1e-6."""

Seen = tuple[Tensor, dict[str, Tensor]]
"""Log-probabilities of a batch, and the weights under their Hugging Face names."""


def train_and_save(folder: Path, engine: dict[str, Any], checkpoint: Path, export: Path) -> Seen:
    """Two steps, then everything that another engine could begin with."""
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        for samples in mini_batches()[:2]:
            worker.train_mini_batch(pack(samples), SFTLoss())
        worker.save_checkpoint(checkpoint, step=2)
        worker.export(export)
        return look(worker)


def begin_with(path: Path, engine: dict[str, Any]) -> Seen:
    """What an engine that starts from `path` is."""
    with TrainingWorker({"path": str(path)}, engine) as worker:
        worker.initialize()
        return look(worker)


def look(worker: TrainingWorker) -> Seen:
    batch: Batch = pack(mini_batches()[2])
    outputs = worker.infer_batch(batch, needs=("log_probs",)).outputs
    assert outputs is not None and outputs.log_probs is not None
    return outputs.log_probs, weights_of(worker)


def agree(found: Seen, expected: Seen) -> None:
    assert same_bits(found[1], expected[1])
    assert (found[0] - expected[0]).abs().max() <= LOG_PROBS


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("llama_tied", "tp2 sp", marks=pytest.mark.more),
        pytest.param("qwen3", "pp2 dp2 distributed", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "pp2 ep2", marks=pytest.mark.more),
        pytest.param("mixtral", "tp2 ep2", marks=pytest.mark.more),
        pytest.param("qwen2", "pp2 vpp2", marks=pytest.mark.more),
        pytest.param("qwen3_moe_dense_first", "pp4 uneven", marks=pytest.mark.more),
        pytest.param("mixtral", "cp2", marks=pytest.mark.more),
    ],
)
def test_both_ways(family, layout, world, folder, tmp_path):
    source = folder(family, num_hidden_layers=LAYERS)
    megatron = world(LAYOUTS[layout].processes)
    sharded = world(2)

    trained = sharded(train_and_save, source, FSDP2, tmp_path / "step-2", tmp_path / "export")[0]
    for start in ("step-2", "export"):
        for seen in megatron(begin_with, tmp_path / start, settings(layout)):
            agree(seen, trained)

    there = tmp_path / "megatron-step-2", tmp_path / "megatron-export"
    trained = megatron(train_and_save, source, settings(layout), *there)[0]
    for start in there:
        for seen in sharded(begin_with, start, FSDP2):
            agree(seen, trained)
    assert torch.isfinite(trained[0]).all()
