"""Engines come and go: several in a process, closed at any point, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engines
from engines.errors import ConfigError, EnginesError, LaunchError
from engines.losses import SFTLoss
from engines.registry import registry
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.live import live_bytes, live_groups, opened, share, train_step
from engines.testing.reference import reference_engine
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject

FIRST, SECOND, THIRD = mini_batches(4)
SAME = 1e-5
"""Relative difference of numbers that nothing has disturbed."""
Steps = list[tuple[float, float]]
"""Loss and gradient norm of each."""
KEPT = 4096
"""Bytes in tensors that libraries may keep for themselves; any matrix of the kit's models has more."""
BARE = 1.5
"""What an engine without optimizer may hold, in float32 models; one with gradients, or a moment, holds 2."""


def two_at_once(folders: Sequence[Path], settings: dict[str, Any]) -> tuple[list[Steps], list[Steps]]:
    """Steps of two engines in turn, the first closed before the last step of the second; and of each alone."""
    alone = []
    for folder in folders:
        with opened(folder, settings) as engine:
            alone.append([train_step(engine, samples) for samples in (FIRST, SECOND)])
    with ExitStack() as stack:
        one, other = (stack.enter_context(opened(folder, settings)) for folder in folders)
        together = [[train_step(one, FIRST)], [train_step(other, FIRST)]]
        together[0].append(train_step(one, SECOND))
        one.close()
        together[1].append(train_step(other, SECOND))
    return together, alone


@clause("contract.md#several-in-one-process")
def test_two_engines_train_as_if_alone(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """State belongs to the engine: two of one layout may live in a process, an actor and its critic say, and each
    trains as it would alone, also after the other is closed.
    """
    family = subject.family_at(some_layout)
    folders = [model(family), model(family, seed=1)]
    for rank, (together, alone) in enumerate(
        on_ranks(some_layout, two_at_once, folders, subject.settings(some_layout))
    ):
        for name, found, expected in zip(("first", "second"), together, alone, strict=True):
            _check_steps(found, expected, f"the {name} of two engines, on rank {rank}")


def _check_steps(found: Steps, expected: Steps, of: str) -> None:
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        assert mine == pytest.approx(theirs, rel=SAME), (
            f"step {step} of {of} has loss and gradient norm {mine}; undisturbed it has {theirs}"
        )


def another_layout(folder: Path, settings: dict[str, Any], others: dict[str, Any]) -> tuple[str | None, Steps, Steps]:
    """The refusal of an engine of another layout beside a living one; steps of that one, and of it alone."""
    with opened(folder, settings) as engine:
        expected = [train_step(engine, samples) for samples in (FIRST, SECOND)]
    refusal = None
    with opened(folder, settings) as engine:
        found = [train_step(engine, FIRST)]
        try:
            with opened(folder, others) as other:
                train_step(other, FIRST)
        except EnginesError as error:
            refusal = str(error)
        found.append(train_step(engine, SECOND))
    return refusal, found, expected


def _two_layouts(subject: Subject) -> tuple[Layout, Layout] | None:
    """Of two processes, and as different as they come."""
    found = [layout for layout in subject.layouts if layout.processes == 2]
    if len(found) < 2:
        return None
    return found[0], max(found[1:], key=lambda other: len(other.needs ^ found[0].needs))


def has_one_layout(subject: Subject) -> str | None:
    """Why nothing can be said of two."""
    return None if _two_layouts(subject) else "it has fewer than two layouts of two processes"


@clause("contract.md#several-in-one-process", unless=has_one_layout)
def test_another_layout_beside_it_works_or_is_refused(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """An engine of another layout in the same process works, or is refused with a message and disturbs nothing."""
    found = _two_layouts(subject)
    assert found is not None
    one, other = found
    folder = model(subject.family_at(other if other.mixture else one))
    answers = on_ranks(one, another_layout, folder, subject.settings(one), subject.settings(other))
    assert len({refusal is None for refusal, _, _ in answers}) == 1, "some ranks refused it, and some didn't"
    for rank, (refusal, found, expected) in enumerate(answers):
        assert refusal is None or len(refusal.split()) > 3, f"{other} beside {one} is refused with {refusal!r}"
        _check_steps(found, expected, f"an engine of {one} beside one of {other}, on rank {rank}")


def beside_the_reference(folder: Path, settings: dict[str, Any]) -> tuple[Steps, Steps]:
    with ExitStack() as stack:
        engine = stack.enter_context(opened(folder, settings))
        stack.enter_context(reference_engine())
        # by argument: what ENGINES_DEVICE says is the device of the engine under test
        selection = registry.resolve("language_model", "reference", "cpu")
        other = stack.enter_context(opened(folder, {"strategy": "reference"}, selection=selection))
        steps = [(train_step(engine, samples), train_step(other, samples)) for samples in (FIRST, SECOND)]
    mine, theirs = zip(*steps, strict=True)
    return list(mine), list(theirs)


def refuse_company(folder: Path, settings: dict[str, Any]) -> str | None:
    with opened(folder, settings), reference_engine():
        selection = registry.resolve("language_model", "reference", "cpu")
        try:
            engines.create({"path": str(folder)}, {"strategy": "reference"}, selection=selection).close()
        except LaunchError as error:
            return str(error)
    return None


def must_be_alone(subject: Subject) -> str | None:
    """Why it may have no company."""
    return "its manifest says process = exclusive" if subject.selection.process == "exclusive" else None


def may_have_company(subject: Subject) -> str | None:
    """Why it may have company."""
    return "its manifest doesn't say process = exclusive" if subject.selection.process == "shared" else None


@clause("contract.md#several-in-one-process", unless=must_be_alone)
def test_another_backend_may_live_beside_it(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """An engine whose `process` is shared trains beside one of another backend, and neither disturbs the other."""
    ((mine, theirs),) = on_ranks(SINGLE, beside_the_reference, model(subject.families[0]), subject.settings())
    _check_steps(mine, theirs, "an engine beside the reference engine, which did the same steps")


@clause("contract.md#several-in-one-process", unless=may_have_company)
def test_no_other_backend_may_live_beside_it(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """Where `process` is exclusive, another backend is refused in the process, with a message that names both."""
    (refusal,) = on_ranks(SINGLE, refuse_company, model(subject.families[0]), subject.settings())
    assert refusal is not None, "another backend was loaded into its process"
    assert subject.selection.backend in refusal and "reference" in refusal, refusal


def close_at_any_point(
    folder: Path, broken: Path, settings: dict[str, Any]
) -> tuple[str | None, Steps, Steps, dict[str, tuple[int, int]]]:
    """The error of a folder without weights, steps before and after all that was closed, and what was left of it:
    process groups and bytes, before and after.
    """
    with opened(folder, settings) as engine:  # what libraries keep for good
        expected = [train_step(engine, FIRST)]
    refusal, left, groups, held = None, {}, live_groups(), live_bytes()

    def note(when: str) -> None:
        left[when] = (live_groups() - groups, live_bytes() - held)

    empty = engines.create({"path": str(folder)}, settings)
    dist.barrier()  # gloo fails where one rank closes a group that another is still joining
    empty.close()
    half = engines.create({"path": str(broken)}, settings)
    dist.barrier()
    try:
        half.initialize()
    except EnginesError as error:
        refusal = str(error)
    half.close()
    del empty, half
    note("an engine that was never initialised, and one whose `initialize` failed")
    with opened(folder, settings) as engine:
        found = [train_step(engine, FIRST)]
        engine.infer_batch(share(engine, SECOND))
    engine.close()
    del engine
    note("an engine that trained")
    return refusal, found, expected, left


@clause("contract.md#what-an-engine-leaves-behind")
def test_closing_at_any_point_leaves_nothing(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """`close` frees process groups and memory: without `initialize`, after one that failed, after training, and when
    called twice. The next engine is as if none had been.
    """
    folder = model(subject.family_at(some_layout))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for rank, (refusal, found, expected, left) in enumerate(
        on_ranks(some_layout, close_at_any_point, folder, tmp_path, subject.settings(some_layout))
    ):
        assert refusal is not None, f"a folder without weights was loaded on rank {rank}"
        for what, (groups, held) in left.items():
            assert groups == 0, f"{groups} process groups are left of {what}, on rank {rank}"
            assert held <= KEPT, f"tensors of {held} bytes are left of {what}, on rank {rank}"
        _check_steps(found, expected, f"an engine that others came before, on rank {rank}")


@dataclass(frozen=True)
class Frozen:
    """What an engine without optimizer answers, refuses and holds."""

    answers_alike: bool
    refusals: dict[str, str | None]
    models_held: float
    """Bytes of its tensors, by those of a float32 model."""


def only_infer(folder: Path, settings: dict[str, Any]) -> Frozen:
    with opened(folder, settings) as engine:
        expected = engine.infer_batch(share(engine, FIRST), share=True).outputs
    del engine  # with all that it may still hold
    before = live_bytes()
    with opened(folder, settings, optimizer=None) as engine:
        batch = share(engine, FIRST)
        found = engine.infer_batch(batch, share=True).outputs
        assert found is not None and found.log_probs is not None
        assert expected is not None and expected.log_probs is not None
        return Frozen(
            torch.equal(found.log_probs, expected.log_probs),
            {
                "train_batch": _refusal(lambda: engine.train_batch(batch, SFTLoss())),
                "optimizer_step": _refusal(engine.optimizer_step),
                "lr_scheduler_step": _refusal(engine.lr_scheduler_step),
            },
            (live_bytes() - before) / (4 * engine.describe()["parameters"]),
        )


def _refusal(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except ConfigError as error:
        return str(error)
    return None


@clause("engines.contract:EngineContext")
def test_an_engine_without_optimizer_only_infers(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """Without optimizer settings an engine infers as with them, holds neither gradients nor optimizer state, and
    refuses to train.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    for rank, found in enumerate(on_ranks(some_layout, only_infer, folder, settings)):
        assert found.answers_alike, f"log-probabilities on rank {rank} are not those of an engine with optimizer"
        assert found.models_held < BARE, f"rank {rank} holds {found.models_held:.2f} models in tensors"
        for what, refusal in found.refusals.items():
            assert refusal is not None, f"{what} was not refused on rank {rank}"
