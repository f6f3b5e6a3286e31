"""FSDP2 on a simulated NPU is FSDP2 on the CPU: the same loss, gradient norm, weights, checkpoint and export."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.determinism import DETERMINISTIC_ENV
from engines.errors import LaunchError
from engines.losses import SFTLoss
from engines.testing.plain import Run
from engines.testing.runs import OPTIMIZER, pack, same_bits, train_with_worker, weights_of
from engines.testing.samples import mini_batches
from engines.worker import TrainingWorker
from support.engine import live_groups

METRICS, WEIGHTS = 5e-7, 1e-6
"""Largest relative difference of loss and gradient norm, and of weights: a few roundings, since only on the CPU torch
has fused kernels for attention and linear layers. Seen: 5e-8 and 5e-8."""


def settings(device: str, **more: Any) -> dict[str, Any]:
    return {"strategy": "fsdp2", "device": device, "micro_batch_size": 2, **more}


def assert_equal_runs(runs: list[Run], expected: Run) -> None:
    for run in runs:
        assert run.losses == pytest.approx(expected.losses, rel=METRICS)
        assert run.grad_norms == pytest.approx(expected.grad_norms, rel=METRICS)
        assert run.lrs == expected.lrs
    assert runs[0].weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(runs[0].weights[name], weight, rtol=0, atol=WEIGHTS * weight.abs().max().item())


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (2, {}),
        pytest.param(4, {"data_parallel_replicate_size": 2}, marks=pytest.mark.more),
        pytest.param(1, {}, marks=pytest.mark.more),
        pytest.param(2, {"activation_checkpointing": True}, marks=pytest.mark.more),
        pytest.param(2, {"reshard_after_forward": False}, marks=pytest.mark.more),
        pytest.param(3, {"accumulate_gradients": "sharded"}, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_trains_as_on_the_cpu(
    size: int,
    more: dict[str, Any],
    world: Any,
    npu_world: Any,
    folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    runs = {
        device: worlds(size)(
            train_with_worker, folder("llama"), mini_batches(), settings(device, **more), export_to=tmp_path / device
        )
        for device, worlds in (("cpu", world), ("npu", npu_world))
    }
    assert_equal_runs(runs["npu"], runs["cpu"][0])
    exported = load_file(tmp_path / "npu/model.safetensors")
    assert same_bits(exported, runs["npu"][0].weights)


Resumed = tuple[list[float], list[float], dict[str, torch.Tensor]]
"""Metrics of a step, numbers drawn on the device before it, and weights then."""


def save(folder: Path, engine: dict[str, Any], checkpoint: Path) -> Resumed:
    """One step, a checkpoint, and another step that whoever resumes must repeat."""
    first, second, _ = mini_batches()
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        assert worker.device.type == engine["device"]
        worker.train_mini_batch(pack(first), SFTLoss())
        torch.rand(7, device=worker.device)  # equal seeds give both kinds of device equal numbers until here
        worker.save_checkpoint(checkpoint, step=1)
        return go_on(worker, second)


def resume(folder: Path, engine: dict[str, Any], checkpoint: Path) -> Resumed:
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        worker.load_checkpoint(checkpoint)
        return go_on(worker, mini_batches()[1])


def go_on(worker: TrainingWorker, batch: Any) -> Resumed:
    drawn, weights = torch.rand(3, device=worker.device).tolist(), weights_of(worker)
    metrics = worker.train_mini_batch(pack(batch), SFTLoss())
    return [metrics["loss"], metrics["grad_norm"]], drawn, weights


def test_checkpoints_move_between_devices(
    world: Any, npu_world: Any, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    worlds = {"cpu": world, "npu": npu_world}
    for writer, reader in (("npu", "npu"), ("npu", "cpu"), ("cpu", "npu")):
        checkpoint = tmp_path / f"{writer}-{reader}"
        saved = worlds[writer](2)(save, folder("llama"), settings(writer), checkpoint)
        resumed = worlds[reader](2)(resume, folder("llama"), settings(reader), checkpoint)
        for (metrics, drawn, weights), (again, drawn_again, loaded) in zip(saved, resumed, strict=True):
            assert same_bits(loaded, weights)
            assert again == (metrics if writer == reader else pytest.approx(metrics, rel=METRICS))
            assert (drawn_again == drawn) == (writer == reader), "each device's own generator goes on"


@pytest.mark.more
def test_a_checkpoint_of_replicas(npu_world: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    hybrid, whole = settings("npu", data_parallel_replicate_size=2), settings("npu")
    saved = npu_world(4)(save, folder("llama"), hybrid, tmp_path / "step-1")
    again = npu_world(4)(resume, folder("llama"), hybrid, tmp_path / "step-1")
    for (metrics, drawn, weights), (metrics_again, drawn_again, loaded) in zip(saved, again, strict=True):
        assert (metrics_again, drawn_again) == (metrics, drawn)
        assert same_bits(loaded, weights)
    for metrics, _, loaded in npu_world(2)(resume, folder("llama"), whole, tmp_path / "step-1"):
        assert metrics == pytest.approx(saved[0][0], rel=METRICS)
        assert same_bits(loaded, saved[0][2])


def open_and_close(folder: Path) -> None:
    device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    with TrainingWorker({"path": str(folder)}, settings("npu"), OPTIMIZER) as worker:
        worker.initialize()
        assert worker.device == device
        worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        outputs = worker.infer_batch(pack(mini_batches()[1]), needs=("log_probs", "entropy")).outputs
        assert all(torch.isfinite(one).all() and one.device.type == "cpu" for one in outputs.present().values())


def live_and_die(folder: Path) -> None:
    open_and_close(folder)  # what torch keeps for good
    torch.npu.reset_peak_memory_stats()
    before, groups = torch.npu.memory_allocated(), live_groups()
    open_and_close(folder)
    assert torch.npu.max_memory_allocated() > before
    assert torch.npu.memory_allocated() == before
    assert live_groups() == groups


def test_closing_frees_device_memory(npu_world: Any, folder: Callable[[str], Path]) -> None:
    npu_world(2)(live_and_die, folder("llama"))


def come_late(folder: Path) -> None:
    for name in DETERMINISTIC_ENV:
        os.environ.pop(name, None)
    torch.ones(1, device="npu")
    with pytest.raises(LaunchError, match=r"HCCL_DETERMINISTIC=true"):
        TrainingWorker({"path": str(folder)}, settings("npu"), OPTIMIZER, deterministic=True)


def test_determinism_is_refused_once_the_device_was_used(npu_world: Any, folder: Callable[[str], Path]) -> None:
    npu_world(1)(come_late, folder("llama"))


def half_precision(folder: Path, device: str) -> float:
    engine = settings(device)
    with TrainingWorker({"path": str(folder), "dtype": "bfloat16"}, engine, OPTIMIZER) as worker:
        worker.initialize()
        return worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())["loss"]


def test_bfloat16(world: Any, npu_world: Any, folder: Callable[[str], Path]) -> None:
    expected = world(2)(half_precision, folder("llama"), "cpu")[0]
    for found in npu_world(2)(half_precision, folder("llama"), "npu"):
        assert found == pytest.approx(expected, rel=1e-2)
