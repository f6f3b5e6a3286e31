"""Value models: samples with values to be met, a loss that reads them, and a run of a worker."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.batch import Batch, TokenOutputs
from engines.testing.plain import Run, Sample, ValuedSample, ValueModel
from engines.testing.runs import OPTIMIZER, note, weights_of
from engines.testing.samples import mini_batches
from engines.worker import TrainingWorker

Values = tuple[Tensor, Tensor]
"""Target-aligned ones `[total_tokens]`, and the last of each sequence `[n]`."""


class ValueLoss:
    """Mean squared errors: over targets, of the value that precedes each, and over sequences, of the last one."""

    needs = frozenset({"values"})
    fields = frozenset({"loss_mask", "returns", "reward"})
    targets_only = True
    equal_weights = False

    def __init__(self, of_targets: float = 1.0, of_ends: float = 1.0) -> None:
        self.coefficients = {"targets": of_targets, "ends": of_ends}

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        return {"targets": batch["loss_mask"].sum(), "ends": torch.tensor(len(batch))}

    def __call__(self, out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
        assert out.values is not None and out.last_values is not None
        mask = batch["loss_mask"]
        return {
            "targets": (out.values[mask] - batch["returns"][mask]).square().sum(),
            "ends": (out.last_values - batch["reward"]).square().sum(),
        }


def valued(size: int = 8) -> list[list[ValuedSample]]:
    """Three mini-batches with values to be met, and in each a sample of a single token."""
    draw = random.Random(5)

    def value(sample: Sample) -> ValuedSample:
        returns = [draw.gauss(0, 1) for _ in sample.input_ids]
        return ValuedSample(sample.input_ids, sample.loss_mask, returns, draw.gauss(0, 1))

    single = Sample([7], [False])
    return [[value(sample) for sample in [*samples, single][-size - 1 :]] for samples in mini_batches(size)]


def pack(samples: Sequence[ValuedSample]) -> Batch:
    """The samples as one batch."""
    rows = [{name: getattr(one, name) for name in ("input_ids", "loss_mask", "returns")} for one in samples]
    return Batch.from_sequences(rows, sequences={"reward": torch.tensor([one.reward for one in samples])})


def scored_folder(folder: Path, source: Path) -> Path:
    """Make `folder` a value model as transformers saves one, on the language model in `source`."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.125, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder)
    return folder


def head_in(folder: Path) -> Tensor:
    """The head of a saved value model."""
    head: Tensor = load_file(folder / "model.safetensors")["score.weight"]
    return head


def plain_values(model: ValueModel, samples: Sequence[Sample]) -> Values:
    """What the plain model says."""
    with torch.no_grad():
        found = [model.after_each_token(sample.input_ids) for sample in samples]
    return torch.cat([torch.cat([one.new_zeros(1), one[:-1]]) for one in found]), torch.stack([f[-1] for f in found])


def plain_run(folder: Path, batches: Sequence[Sequence[ValuedSample]], **weights: float) -> tuple[Values, Run]:
    """Values of the first mini-batch before training, and the run; of the value model in `folder`."""
    model = ValueModel(folder, head_in(folder))
    return plain_values(model, batches[0]), model.train(batches, **weights, **OPTIMIZER)


def worker_of(folder: Path, engine: Mapping[str, Any], **more: Any) -> TrainingWorker:
    """One rank's worker, initialised."""
    made = TrainingWorker({"path": str(folder)}, engine, OPTIMIZER, model_type="value_model", total_steps=3, **more)
    made.initialize()
    return made


def values_of(worker: TrainingWorker, samples: Sequence[ValuedSample]) -> Values:
    """What the engine says; all ranks call it."""
    outputs = worker.infer_batch(pack(samples), needs=("values",)).outputs
    assert outputs is not None and outputs.values is not None and outputs.last_values is not None
    assert outputs.present().keys() == {"values", "last_values"}, f"the outputs are {sorted(outputs.present())}"
    return outputs.values, outputs.last_values


def train_values(
    folder: Path, batches: Sequence[Sequence[ValuedSample]], engine: Mapping[str, Any], loss: ValueLoss
) -> tuple[Values, Run]:
    """One rank's part: values of the first mini-batch, then a step on each."""
    run = Run()
    with worker_of(folder, engine) as worker:
        before = values_of(worker, batches[0])
        for samples in batches:
            note(worker.train_mini_batch(pack(samples), loss), run)
        weights = weights_of(worker)
        if worker.rank == 0:
            run.weights = weights
    return before, run


def assert_values_agree(found: Sequence[Values], reference: Values) -> None:
    """Every rank has the same, and the reference's."""
    for rank, one in enumerate(found):
        for name, mine, first, truth in zip(("values", "last_values"), one, found[0], reference, strict=True):
            assert torch.equal(mine, first), f"{name} of rank {rank} are not those of rank 0"
            off = (mine - truth).abs()
            assert bool((off <= 5e-6 + 1e-5 * truth.abs()).all()), (
                f"{name} are off by up to {off.max().item():.1e} from those of the plain backbone with its head"
            )
