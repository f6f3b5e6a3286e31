"""A run of `TrainingWorker` on one rank of a world, and how far it is from the reference's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.batch import Batch
from engines.losses import SFTLoss
from engines.testing.explaining import scaled
from engines.testing.plain import Run, Sample, saved_weights
from engines.testing.reference.model import load_model
from engines.worker import TrainingWorker

OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "clip_grad": 1.0}
"""The larger eps keeps AdamW from turning rounding noise in gradients that are truly 0 into whole steps."""
METRICS, WEIGHTS = 2e-6, 1e-5
"""Largest relative difference of loss and gradient norm, and of weights; correct code is at 2e-7 and 1.4e-6."""


def pack(samples: Sequence[Sample]) -> Batch:
    """The samples as one batch."""
    return Batch.from_sequences([vars(sample) for sample in samples])


def train_with_worker(
    folder: Path,
    mini_batches: Sequence[Sequence[Sample]],
    engine: Mapping[str, Any],
    optimizer: Mapping[str, Any] = OPTIMIZER,
    export_to: Path | None = None,
) -> Run:
    """One rank's part of a run; every rank returns the metrics, rank 0 the weights too."""
    run = Run()
    with TrainingWorker({"path": str(folder)}, engine, optimizer, total_steps=len(mini_batches)) as worker:
        worker.initialize()
        for samples in mini_batches:
            metrics = worker.train_mini_batch(pack(samples), SFTLoss())
            note(metrics, run)
            assert_counts_agree(metrics, samples)
        weights = weights_of(worker)
        if worker.rank == 0:
            run.weights = weights
        if export_to is not None:
            worker.export(export_to)
    return run


def note(metrics: Mapping[str, Any], run: Run) -> None:
    """Add a step, which must not have been skipped, to the run."""
    assert metrics["skipped_step"] is None, f"a step was skipped: {metrics}"
    run.losses.append(metrics["loss"])
    run.grad_norms.append(metrics["grad_norm"])
    run.lrs.append(metrics["lr"])


def weights_of(worker: TrainingWorker) -> dict[str, Tensor]:
    """Full tensors on the CPU by their Hugging Face names; all ranks call it. Of an engine that doesn't declare
    `export`, those of its checkpoint, which every engine writes.
    """
    if "export" not in worker.selection.capabilities:
        return _saved_weights(worker)
    stream, adapter = worker.engine.get_per_tensor_param()
    assert adapter is None
    return {name: tensor.to("cpu", copy=True) for name, tensor in stream}


def _saved_weights(worker: TrainingWorker) -> dict[str, Tensor]:
    folder = [tempfile.mkdtemp() if worker.rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0])) / "weights"
    worker.save_checkpoint(path)
    try:
        return saved_weights(load_model(str(path), worker.selection.model_type))
    finally:
        dist.barrier()
        if worker.rank == 0:
            rmtree(path.parent)


def assert_counts_agree(metrics: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """Tokens and targets are those of all samples, each once."""
    counted = {
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "targets": sum(sample.num_targets for sample in samples),
    }
    for name, count in counted.items():
        assert metrics[name] == count, f"{name} are {metrics[name]}, of samples that have {count}"


def assert_metrics_agree(runs: Sequence[Run], reference: Run, tolerance: float = METRICS) -> None:
    """All ranks report the same, and the reference's, loss, gradient norm and learning rate."""
    for name in ("lrs", "losses", "grad_norms"):
        for rank, run in enumerate(runs):
            assert getattr(run, name) == getattr(runs[0], name), (
                f"{name} of the steps are {getattr(run, name)} on rank {rank}, {getattr(runs[0], name)} on rank 0;"
                " where the first step's losses are equal, gradients may not be summed over `ranks.dp_group`"
            )
    for name in ("lrs", "losses", "grad_norms"):
        found, expected = getattr(runs[0], name), getattr(reference, name)
        off = [abs(a - b) / abs(b) if a != b else 0.0 for a, b in zip(found, expected, strict=True)]
        assert max(off) <= (0 if name == "lrs" else tolerance), (
            f"{name} of the steps are {found} instead of {expected}, off by {[f'{one:.1e}' for one in off]}"
            f"{scaled(found, expected, len(runs))}"
        )


def assert_weights_agree(
    weights: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float = WEIGHTS
) -> None:
    """All of the reference's, of the same shapes and dtypes, and nearly the same values; there may be others."""
    missing = sorted(reference.keys() - weights.keys())
    assert not missing, f"weights are missing: {missing}"
    kinds = {name: (tuple(weights[name].shape), weights[name].dtype) for name in reference}
    other = [
        f"{name} is {kinds[name]} instead of {(tuple(one.shape), one.dtype)}"
        for name, one in reference.items()
        if kinds[name] != (tuple(one.shape), one.dtype)
    ]
    assert not other, f"weights have other shapes or dtypes: {'; '.join(other)}"
    off = {
        name: ((weights[name] - expected).abs().max() / expected.abs().max()).item()
        for name, expected in reference.items()
    }
    far = {name: value for name, value in off.items() if not value <= tolerance}
    assert not far, f"weights are off by {far}"


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of weights are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
