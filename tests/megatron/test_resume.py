"""A Megatron run goes on to the bit from its checkpoint, and at any other layout from then on."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engines.errors import CheckpointError
from engines.losses import SFTLoss
from engines.testing.runs import OPTIMIZER, assert_weights_agree, pack, same_bits, weights_of
from engines.testing.samples import mini_batches
from engines.worker import TrainingWorker
from support.megatron import LAYOUTS, settings

SCHEDULE = {**OPTIMIZER, "warmup_steps": 4, "weight_decay": 0.1}
"""A rate that depends on the position in the schedule, and a decay that shows a lost main parameter."""


def run(
    folder: Path,
    engine: dict[str, Any],
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
    dtype: str = "float32",
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Metrics of each step, and the weights in the end."""
    batches = mini_batches()
    with TrainingWorker({"path": str(folder), "dtype": dtype}, engine, SCHEDULE) as worker:
        worker.initialize()
        if load is not None:
            worker.load_checkpoint(load)
        seen = [worker.train_mini_batch(pack(batches[step % len(batches)]), SFTLoss()) for step in steps]
        if save is not None:
            worker.save_checkpoint(save, step=steps.stop)
        return seen, weights_of(worker)


CASES = [
    ("llama_tied", "tp2 sp", "tp2 sp"),
    ("qwen3", "pp2 dp2 distributed", "pp2 dp2 distributed"),
    ("llama_tied", "pp2 vpp2", "single"),
]
MORE = [
    ("qwen3_moe", "ep2", "tp2 etp2"),
    ("qwen3_moe", "pp2 ep2", "pp2 ep2"),
    ("llama_tied", "tp2 sp", "pp2"),
    ("qwen3_moe_dense_first", "pp2 dp2 distributed", "ep2"),
    ("qwen2", "dp2", "pp2 dp2 distributed"),
    ("mixtral", "tp2 ep2", "single"),
    ("qwen3", "single", "tp2 cp2"),
    ("qwen3", "cp2", "dp2"),
    ("llama", "tp2 pp2", "pp4 uneven"),
    ("qwen2", "pp2 vpp2", "pp2 vpp2"),
    ("mixtral", "pp2 dp2 distributed", "tp2 ep2"),
]


@pytest.mark.parametrize(
    ("family", "first", "second"), [*CASES, *(pytest.param(*case, marks=pytest.mark.more) for case in MORE)]
)
def test_goes_on_where_it_stopped(family, first, second, world, deep, tmp_path):
    here, there = world(LAYOUTS[first].processes), world(LAYOUTS[second].processes)
    expected, whole = here(run, deep(family), settings(first), range(4))[0]
    here(run, deep(family), settings(first), range(2), save=tmp_path / "step-2")
    for metrics, weights in there(run, deep(family), settings(second), range(2, 4), load=tmp_path / "step-2"):
        if first == second:
            assert metrics == expected[2:]
            assert same_bits(weights, whole)
        else:
            for ours, theirs in zip(metrics, expected[2:], strict=True):
                for name in ("loss", "grad_norm", "lr"):
                    assert ours[name] == pytest.approx(theirs[name], rel=5e-6)
            assert_weights_agree(weights, whole, 3e-5)


@pytest.mark.parametrize("layout", [pytest.param("tp2 sp", marks=pytest.mark.more), "pp2 dp2 distributed"])
def test_bfloat16_keeps_its_main_parameters(layout, world, deep, tmp_path):
    """Resumed to the bit: float32 masters are saved, not what the model computes with."""
    ranks = world(LAYOUTS[layout].processes)
    expected, whole = ranks(run, deep("qwen3"), settings(layout), range(4), dtype="bfloat16")[0]
    ranks(run, deep("qwen3"), settings(layout), range(2), save=tmp_path / "step-2", dtype="bfloat16")
    resumed = ranks(run, deep("qwen3"), settings(layout), range(2, 4), load=tmp_path / "step-2", dtype="bfloat16")
    for metrics, weights in resumed:
        assert metrics == expected[2:]
        assert same_bits(weights, whole)


def save_twice(folder: Path, engine: dict[str, Any], target: Path) -> list[str]:
    """What processes this one started."""
    with TrainingWorker({"path": str(folder)}, engine, SCHEDULE) as worker:
        worker.initialize()
        worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        worker.save_checkpoint(target / "step-1", step=1)
        worker.save_checkpoint(target / "step-2", step=2)
    return [child.name() for child in psutil.Process().children(recursive=True)] + [
        child.name for child in multiprocessing.active_children()
    ]


def test_a_save_leaves_no_process(world, deep, tmp_path):
    """Megatron's own writer starts a manager process that outlives it."""
    assert world(2)(save_twice, deep("qwen3_moe"), settings("tp2 ep2"), tmp_path) == [[], []]


def test_a_checkpoint_of_another_model_is_refused(world, deep, tmp_path):
    ranks = world(2)
    ranks(run, deep("llama"), settings("tp2 sp"), range(1), save=tmp_path / "step-1")
    for message in ranks(refused, deep("qwen2"), settings("pp2"), tmp_path / "step-1"):
        assert "belongs to another run" in message and "model" in message


def refused(folder: Path, engine: dict[str, Any], checkpoint: Path) -> str:
    with TrainingWorker({"path": str(folder)}, engine, SCHEDULE) as worker:
        worker.initialize()
        with pytest.raises(CheckpointError) as caught:
            worker.load_checkpoint(checkpoint)
        return str(caught.value)
