"""In low precision an engine computes, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.numbers import Numbers, assert_near, numbers_of
from engines.testing.runs import pack
from engines.testing.samples import mini_batches
from engines.testing.saved import tensors_in, weights_in
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

LOW = {"dtype": "bfloat16"}
NEAR, NEAR_OF_MIXTURES, FLOAT32 = 0.03, 0.06, 5e-6
"""Relative differences of loss and gradient norm from float32: the largest that bfloat16 may make, and the largest
that float32 itself makes. Of a plain model with four layers whose linear layers' outputs are rounded at random as
bfloat16 rounds, the norm moves by up to 2e-3; of a mixture by up to 2.4e-2, since rows go to other experts."""
SMALL: dict[str, Any] = {"lr": 1e-5, "eps": 1e-8}
FURTHEST = 3e-5
"""By which two steps of it move a weight at most; a bfloat16 near 1 has no place for less than 4e-3."""


def take_small_steps(folder: Path, settings: dict[str, Any], before: Path, after: Path) -> tuple[Numbers, set[str]]:
    """Numbers of two steps, and the dtypes of what is exported then."""
    with TrainingWorker({"path": str(folder), **LOW}, settings, SMALL) as worker:
        worker.initialize()
        worker.save_checkpoint(before)
        numbers = numbers_of(worker, mini_batches()[:2])
        worker.save_checkpoint(after, step=2)
        if "export" not in worker.selection.capabilities:
            return numbers, set()
        return numbers, {str(tensor.dtype) for _, tensor in worker.engine.get_per_tensor_param()[0]}


@clause("engines.config:ModelConfig", needs=("bfloat16",))
def test_bfloat16_is_for_computing_alone(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """Under `model.dtype: bfloat16` the model computes in it, and loss and gradient norm stay near those of float32.
    Parameters and optimizer state are float32, also in checkpoints, so that updates which bfloat16 has no place for
    are kept; exports are bfloat16.
    """
    family, (before, after) = subject.family_at(some_layout), (tmp_path / "step-0", tmp_path / "step-2")
    settings = subject.settings(some_layout, micro_batch_size=1)
    answers = on_ranks(some_layout, take_small_steps, model(family), settings, before, after)
    exact = plain.train(model(family), mini_batches()[:2], **SMALL)
    expected = [{"loss": one, "grad_norm": two} for one, two in zip(exact.losses, exact.grad_norms, strict=True)]
    near = NEAR_OF_MIXTURES if family in subject.mixtures else NEAR
    for rank, (numbers, exported) in enumerate(answers):
        assert_near(numbers, expected, near, f"in bfloat16 on rank {rank}")
        assert abs(numbers[0]["grad_norm"] / exact.grad_norms[0] - 1) > FLOAT32, (
            f"rank {rank} has the gradient norm of float32: it computes in another dtype than model.dtype says"
        )
        assert exported <= {"torch.bfloat16"}, f"rank {rank} exports {', '.join(sorted(exported))}"
    saved = tensors_in(after)
    low = [key for key, value in saved.items() if value.is_floating_point() and value.dtype != torch.float32]
    assert not low, f"these are not float32 in a checkpoint: {', '.join(low)}"
    old, new = weights_in(before), weights_in(after)
    near_one = [name for name, value in old.items() if value.dim() == 1 and bool((value.abs() > 0.5).all())]
    moved = {name: (new[name] - old[name]).abs() for name in near_one}
    wrong = {name: by for name, by in moved.items() if not bool((by > 0).all() and (by <= FURTHEST).all())}
    assert near_one and not wrong, (
        f"two steps at a rate of {SMALL['lr']} move weights near 1 by {SMALL['lr']} to {FURTHEST}, but "
        + ", ".join(f"those of {name} by {by.min():.1e} to {by.max():.1e}" for name, by in wrong.items())
    )


LINEAR = {"lr": 1.0, "eps": 1.0, "clip_grad": None}
"""AdamW's first step on it moves a weight by g / (|g| + 1), which tells the gradient g."""
SUMS = 1e-4
"""Largest relative difference of such gradients: float32 sums are at 1e-8, sums in bfloat16 at 1e-3."""


def take_one_step(folder: Path, settings: dict[str, Any], before: Path, after: Path) -> None:
    with TrainingWorker({"path": str(folder), **LOW}, settings, LINEAR) as worker:
        worker.initialize()
        worker.save_checkpoint(before)
        worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        worker.save_checkpoint(after, step=1)


def gradient(before: Path, after: Path) -> Tensor:
    """Of all weights, as one vector."""
    old, new = weights_in(before), weights_in(after)
    moved = torch.cat([(old[name].double() - new[name].double()).flatten() for name in sorted(old)])
    return moved / (1 - moved.abs())


@clause("numbers.md#exceptions", needs=("bfloat16", "data_parallel"))
def test_bfloat16_gradients_are_summed_in_float32(
    subject: Subject, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """A sample's gradient is the same wherever it is computed, and loses nothing in the sum over micro-batches and
    data-parallel ranks: a gradient of two ranks is that of one process.
    """
    dp2 = next(one for one in subject.layouts if one.needs == {"data_parallel"})
    folder, found = model(subject.families[0]), []
    for layout in (SINGLE, dp2):
        paths = tmp_path / f"{layout}-0", tmp_path / f"{layout}-1"
        on_ranks(layout, take_one_step, folder, subject.settings(layout, micro_batch_size=1), *paths)
        found.append(gradient(*paths))
    off = ((found[1] - found[0]).norm() / found[0].norm()).item()
    assert off <= 1e-4, (
        f"in bfloat16 the gradient of two ranks is {off:.1e} from that of one process; float32 is 1e-6"
    )
