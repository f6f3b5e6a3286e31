"""What each rank of a run does. Nothing is imported at the top: the process that asks for it has no torch."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.devices import DEVICE_VARIABLE
from engines.errors import EnginesError
from engines.launch import RunFailed
from engines.verifying.numbers import Trained

if TYPE_CHECKING:
    from engines.worker import TrainingWorker

SEED = 3
"""Of the samples; whatever else is random is seeded by the worker."""


@dataclass(frozen=True)
class Samples:
    """How to draw the mini-batches, which every rank of every run draws for itself."""

    steps: int
    vocab: int
    longest: int | None
    """The most tokens that the model takes; None: as many as there are."""


def train(
    model: Path, engine: Mapping[str, Any], samples: Samples, export_to: Path, expected: Path | None
) -> Trained:
    """One rank's part of a run, which exports its model and compares it with that in the folder `expected`, if any.

    Raises what the engine says against the model or the layout; `RunFailed` for a step that is skipped, and for what
    the engine refuses when it has begun to train.
    """
    from engines.testing.runs import OPTIMIZER

    began = time.monotonic()
    with _worker(model, engine, OPTIMIZER, total_steps=samples.steps) as worker:
        worker.initialize()
        try:
            worker.engine.check_layout()
            losses, grad_norms = _train(worker, samples)
            worker.export(export_to)
            weights, exported, faults = _compare(worker, export_to, expected)
        except EnginesError as error:
            raise RunFailed(str(error)) from error
    return Trained(losses, grad_norms, weights, exported, faults, time.monotonic() - began)


def _worker(model: Path, engine: Mapping[str, Any], *arguments: Any, **more: Any) -> TrainingWorker:
    """On the device that `engine` names, whatever the user's environment says: the baseline may run on another."""
    from engines.worker import TrainingWorker

    os.environ[DEVICE_VARIABLE] = engine["device"]
    return TrainingWorker({"path": str(model)}, engine, *arguments, **more)


def _train(worker: TrainingWorker, samples: Samples) -> tuple[list[float], list[float]]:
    from engines.losses import SFTLoss
    from engines.testing.runs import pack
    from engines.testing.samples import LONGEST, mini_batches

    losses, grad_norms = [], []
    longest = min(LONGEST, samples.longest or LONGEST)
    batches = mini_batches(seed=SEED, steps=samples.steps, vocab=samples.vocab, longest=longest)
    for step, batch in enumerate(batches, start=1):
        metrics = worker.train_mini_batch(pack(batch), SFTLoss())
        if metrics["skipped_step"] is not None:
            raise RunFailed(f"step {step} was skipped: {metrics['skipped_step']}")
        losses.append(metrics["loss"])
        grad_norms.append(metrics["grad_norm"])
    return losses, grad_norms


def _compare(worker: TrainingWorker, exported: Path, expected: Path | None) -> tuple[float, float, list[str]]:
    """Every rank sends its weights; rank 0 looks at them."""
    from engines.verifying.weights import compare_weights

    stream, _ = worker.engine.get_per_tensor_param()
    if worker.rank == 0:
        return compare_weights(stream, exported, expected or exported)
    deque(stream, maxlen=0)
    return 0.0, 0.0, []


def export_rounded(model: Path, engine: Mapping[str, Any], export_to: Path) -> None:
    """Write the model's weights, each number of them rounded otherwise."""
    from engines.verifying.weights import round_otherwise

    with _worker(model, engine) as worker:
        worker.initialize()
        worker.export(export_to)
        if worker.rank == 0:
            round_otherwise(export_to, SEED)


def count_devices(torch_device: str) -> int:
    """How many devices of a kind this process sees."""
    import torch

    return int(torch.get_device_module(torch_device).device_count())


def make_models(folder: Path) -> dict[str, Path]:
    """Every model that the kit knows, by family."""
    from engines.testing.subject import DENSE, LAYERS, MIXTURES
    from engines.testing.tiny import tiny_folder

    return {family: tiny_folder(folder, family, num_hidden_layers=LAYERS) for family in (*DENSE, *MIXTURES)}
