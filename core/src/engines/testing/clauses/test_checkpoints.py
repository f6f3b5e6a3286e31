"""A run goes on from its checkpoint as if it had never stopped, at the same layout to the bit, and at any other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.contract import hookimpl
from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks, PlainRun
from engines.testing.layouts import SINGLE, Layout
from engines.testing.reference.model import load_model
from engines.testing.runs import OPTIMIZER, pack
from engines.testing.samples import mini_batches
from engines.testing.saved import assert_equal_checkpoints, tensors_in, weights_in
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

SCHEDULE = {**OPTIMIZER, "warmup_steps": 4, "weight_decay": 0.1}
"""A rate that depends on the position in the schedule, and a decay that shows what isn't restored."""
METRICS = 5e-6
"""Largest relative difference of loss and gradient norm from plain PyTorch after another layout went on."""
LOG_PROBS = 2e-5
"""Largest difference of a log-probability between the engine and a model that starts from its checkpoint."""
NUMBERS = ("loss", "grad_norm", "lr")


@dataclass
class Seen:
    """What one rank saw."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """`NUMBERS` of each."""
    draws: list[list[float]] = field(default_factory=list)
    """Of each random generator, right after each checkpoint that was written or read."""


def train(
    folder: Path,
    settings: dict[str, Any],
    steps: range,
    *,
    load: Path | None = None,
    save: Mapping[int, Path] = MappingProxyType({}),
    seed: int = 0,
) -> Seen:
    """The numbered steps of a run: after `load`, and with a checkpoint after each step that `save` names."""
    seen, batches = Seen(), mini_batches(steps=steps.stop)
    with TrainingWorker({"path": str(folder)}, settings, SCHEDULE, seed=seed) as worker:
        worker.initialize()
        if load is not None:
            worker.load_checkpoint(load)
            seen.draws.append(draws(worker))
        for step in steps:
            metrics = worker.train_mini_batch(pack(batches[step]), SFTLoss())
            seen.steps.append({name: metrics[name] for name in NUMBERS})
            if step + 1 in save:
                worker.save_checkpoint(save[step + 1], step=step + 1)
                seen.draws.append(draws(worker))
    return seen


def draws(worker: TrainingWorker) -> list[float]:
    """A number of each generator that dropout, or a sampler, may draw from."""
    numbers = torch.rand(()), torch.rand((), device=worker.device)
    return [random.random(), np.random.rand(), *(number.item() for number in numbers)]


FirstStep = Callable[[str], Path]


@pytest.fixture
def first_step(
    subject: Subject, once_on_ranks: OnRanks, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> FirstStep:
    """`first_step(family)`: the checkpoint of one process after a step."""

    def get(family: str) -> Path:
        target = tmp_path_factory.getbasetemp() / f"{subject.selection.backend}-{family}-step-1"
        once_on_ranks(SINGLE, begin, model(family), subject.settings(), target)
        return target

    return get


def begin(folder: Path, settings: dict[str, Any], target: Path) -> None:
    train(folder, settings, range(1), save={1: target})


@pytest.fixture
def trained_with(subject: Subject, model: Model) -> Path:
    """The first dense model; with dropout in its attention, where the engine builds that."""
    plainly, dropping = model(subject.families[0]), model(subject.families[0], attention_dropout=0.2)
    return plainly if subject.refuses(dropping, SINGLE) else dropping


@clause("checkpoints.md#opening-one")
def test_a_resumed_run_is_equal_to_the_bit(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, trained_with: Path, model: Model, tmp_path: Path
) -> None:
    """At the layout that saved it, a resumed run has the losses, gradient norms, learning rates and random numbers of
    the uninterrupted one to the bit, dropout included, and leaves the same weights and optimizer state: `load_shards`
    and `load_extra_state` restore all that a step depends on, core the random generators.
    """
    folder = model(subject.family_at(some_layout)) if some_layout.mixture else trained_with
    settings = subject.settings(some_layout, micro_batch_size=3)
    two, four, resumed = (tmp_path / name for name in ("step-2", "step-4", "resumed-4"))
    whole = on_ranks(some_layout, train, folder, settings, range(4), save={2: two, 4: four})
    # a seed of its own, so that nothing but the checkpoint can have put the generators where they are
    again = on_ranks(some_layout, train, folder, settings, range(2, 4), load=two, save={4: resumed}, seed=1)
    for rank, (ours, theirs) in enumerate(zip(again, whole, strict=True)):
        for step, (found, expected) in enumerate(zip(ours.steps, theirs.steps[2:], strict=True), start=3):
            assert found == expected, (
                f"on rank {rank} step {step} of the resumed run is {found} instead of {expected}"
            )
        for step, found_draws, expected_draws in zip((2, 4), ours.draws, theirs.draws, strict=True):
            assert found_draws == expected_draws, (
                f"after step {step}, Python's, NumPy's, torch's and the device's random numbers on rank {rank} are "
                f"{found_draws} in the resumed run instead of {expected_draws}"
            )
    assert_equal_checkpoints(resumed, four)


@clause("checkpoints.md#what-lies-in-a-checkpoint")
def test_another_layout_goes_on(
    subject: Subject,
    layout: Layout,
    on_ranks: OnRanks,
    first_step: FirstStep,
    model: Model,
    plain_run: PlainRun,
    tmp_path: Path,
) -> None:
    """A run whose first step one process made, its second this layout and its third one process again has the numbers
    of plain PyTorch: ranks save blocks that cover every element of every tensor once, and read whichever blocks their
    own layout needs, of weights and optimizer state alike.
    """
    family = subject.family_at(layout)
    folder, two = model(family), tmp_path / "step-2"
    second = on_ranks(
        layout, train, folder, subject.settings(layout), range(1, 2), load=first_step(family), save={2: two}
    )
    third = on_ranks(SINGLE, train, folder, subject.settings(), range(2, 3), load=two)
    expected = plain_run(family, **SCHEDULE)
    for step, seen, doing in ((1, second, "read one process's checkpoint"), (2, third, "wrote its checkpoint")):
        for rank, one in enumerate(seen):
            wanted = expected.losses[step], expected.grad_norms[step], expected.lrs[step]
            for name, value in zip(NUMBERS, wanted, strict=True):
                found = one.steps[0][name]
                assert abs(found - value) <= METRICS * abs(value), (
                    f"after {layout} {doing}, {name} of step {step + 1} is {found} on rank {rank} instead of {value}"
                )


def go_back(
    folder: Path, settings: dict[str, Any], start: Path
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Two steps, and the same two again after the checkpoint from before them was read."""
    batches = [pack(samples) for samples in mini_batches()[:2]]
    with TrainingWorker({"path": str(folder)}, settings, SCHEDULE) as worker:
        worker.initialize()
        worker.save_checkpoint(start)

        def two_steps() -> list[dict[str, float]]:
            metrics = [worker.train_mini_batch(batch, SFTLoss()) for batch in batches]
            return [{name: one[name] for name in NUMBERS} for one in metrics]

        before = two_steps()
        worker.load_checkpoint(start)
        return before, two_steps()


@clause("engines.contract:BaseEngine.load_shards")
def test_loading_replaces_all_state(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """A checkpoint from before the first step, when an optimizer has no state yet, puts an engine that has trained
    back to its start: the same steps give the same numbers to the bit.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    for rank, (before, after) in enumerate(on_ranks(some_layout, go_back, folder, settings, tmp_path / "step-0")):
        for step, (found, expected) in enumerate(zip(after, before, strict=True), start=1):
            assert found == expected, (
                f"on rank {rank} step {step} after going back is {found}, and was {expected}: something of the steps "
                "before `load_checkpoint` outlives it"
            )


class States:
    """Keeps the small state that an engine hands over."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @hookimpl(wrapper=True)
    def extra_state(self) -> Generator[None, dict[str, Any], dict[str, Any]]:
        state = yield
        self.seen.append(state)
        return state


def save_after_a_step(folder: Path, settings: dict[str, Any], target: Path) -> tuple[Any, Tensor]:
    """The small state that was saved, and the log-probabilities of the model that was."""
    states = States()
    with TrainingWorker({"path": str(folder)}, settings, SCHEDULE, wrappers=[states]) as worker:
        worker.initialize()
        worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        worker.save_checkpoint(target, step=1)
        return states.seen[-1], log_probs(worker)


def log_probs(worker: TrainingWorker) -> Tensor:
    outputs = worker.infer_batch(pack(mini_batches()[1])).outputs
    assert outputs is not None and outputs.log_probs is not None
    return outputs.log_probs


@clause("engines.contract:BaseEngine.extra_state")
def test_small_state_is_json_and_equal_on_all_ranks(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """`extra_state` holds JSON values alone, which come back from a file as they were, and is equal on all ranks."""
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    states = [state for state, _ in on_ranks(some_layout, save_after_a_step, folder, settings, tmp_path / "step-1")]
    for rank, state in enumerate(states):
        back = json.loads(json.dumps(state))
        assert back == state, f"on rank {rank} extra_state is {state}, and comes back from JSON as {back}"
        assert state == states[0], f"extra_state is {state} on rank {rank} and {states[0]} on rank 0"


def start_without_optimizer(path: Path, settings: dict[str, Any], target: Path) -> Tensor:
    """The log-probabilities of a run that starts from `path` and only infers; it saves what it has loaded."""
    with TrainingWorker({"path": str(path)}, settings) as worker:
        worker.initialize()
        worker.save_checkpoint(target)
        return log_probs(worker)


@clause("checkpoints.md#starting-another-run-from-one")
def test_a_checkpoint_is_a_model(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """What any layout saved is a model for any engine: behind `model.` its keys are the names that transformers, or
    Hugging Face folders, know. An engine without an optimizer starts from it by `model.path`, reads no optimizer
    state and hands over none; transformers loads it too. Both say what the engine said that saved it.
    """
    folder = model(subject.family_at(some_layout))
    saved, own = tmp_path / "step-1", tmp_path / "step-0"
    answers = on_ranks(some_layout, save_after_a_step, folder, subject.settings(some_layout), saved)
    started = on_ranks(SINGLE, start_without_optimizer, saved, subject.settings(), own)[0]
    ids = [sample.input_ids for sample in mini_batches()[1]]
    loaded = load_model(str(saved), "language_model")
    by_transformers = torch.cat([plain.log_probs(loaded, one) for one in ids])
    for rank, (_, expected) in enumerate(answers):
        for who, found in (("the engine that started from it", started), ("transformers", by_transformers)):
            off = (found - expected).abs().max().item()
            assert off <= LOG_PROBS, (
                f"log-probabilities of {who} are {off:.1e} from those of rank {rank} at {some_layout}, which saved it"
            )
    extra = sorted(key for key in tensors_in(own) if not key.startswith("model."))
    assert not extra, f"an engine without an optimizer hands over {', '.join(extra)}"
    held, trained = weights_in(own), weights_in(saved)
    names = sorted(held.keys() ^ trained.keys())
    assert not names, f"one process and {some_layout} save weights by other names: {', '.join(names)}"
    wrong = [name for name, tensor in trained.items() if not torch.equal(held[name], tensor)]
    assert not wrong, f"weights that were read are not those that were saved: {', '.join(wrong)}"
