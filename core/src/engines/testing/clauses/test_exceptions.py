"""An exception is the caller's to see, and the engine is none the worse for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.live import Fail, opened, share, train_step
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject

FIRST, SECOND, _ = mini_batches()
SAME = 1e-5
"""Relative difference of numbers that nothing has disturbed."""
FAULTS = {
    "a training pass before a forward": (False, False),
    "an inferring pass before a forward": (True, False),
    "a training pass after a forward": (False, True),
}
"""Where an exception is raised: whether in inference, and whether after the forward of the second micro-batch."""


def interrupt(folder: Path, settings: dict[str, Any], faults: dict[str, tuple[bool, bool]]) -> tuple[Any, Any]:
    """What came of each fault, and the numbers of two steps afterwards."""
    raised = {}
    with opened(folder, settings) as engine:
        train_step(engine, SECOND)
        for name, (forward_only, after) in faults.items():
            engine.wrap(fault := Fail(at=1, after=after))
            try:
                engine.infer_batch(share(engine, FIRST)) if forward_only else train_step(engine, FIRST)
                raised[name] = "nothing"
            except RuntimeError as error:
                raised[name] = str(error)
            engine.unwrap(fault)
        return raised, [train_step(engine, FIRST), train_step(engine, SECOND)]


def _check_faults(layout: Layout, subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    folder, settings = model(subject.families[0]), subject.settings(layout, micro_batch_size=1)
    runs = (on_ranks(layout, interrupt, folder, settings, faults) for faults in (FAULTS, {}))
    for rank, ((raised, found), (_, expected)) in enumerate(zip(*runs, strict=True)):
        for fault, said in raised.items():
            assert said == "injected", f"an exception in {fault} reached the caller on rank {rank} as: {said}"
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
            assert mine == pytest.approx(theirs, rel=SAME), (
                f"step {step} after the exceptions has loss and gradient norm {mine} on rank {rank}, {theirs} without"
            )


@clause("contract.md#what-an-engine-leaves-behind")
def test_exceptions_reach_the_caller_and_leave_nothing(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """An exception in a forward comes out of `train_batch` and `infer_batch` as it is, and the next step is as if
    nothing had been.
    """
    _check_faults(SINGLE, subject, on_ranks, model)


@clause("contract.md#what-an-engine-leaves-behind", needs={"data_parallel"})
def test_ranks_go_on_together_after_an_exception(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """Where data-parallel ranks meet the same exception, none waits for another, and their next step is as if nothing
    had been.
    """
    (layout,) = [one for one in subject.layouts if one.name == "dp2"]
    _check_faults(layout, subject, on_ranks, model)
