"""The engine's hooks: seams for others, that change nothing of what passes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.batch import Batch
from engines.contract import MicroResult, hookimpl
from engines.engine import Engine
from engines.engine.binding import HOOKS, check_engine_class
from engines.errors import ContractError
from engines.loading import load
from engines.losses import SFTLoss
from engines.registry import registry
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.live import opened, share, train_step
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject

SAMPLES = mini_batches()[0][:4]


def fault_of_class(settings: dict[str, Any]) -> str | None:
    selection = registry.resolve("language_model", settings["strategy"], settings["device"])
    try:
        check_engine_class(load(selection).engine_class, selection.capabilities, selection.distribution)
    except ContractError as fault:
        return str(fault)
    return None


@clause("contract.md#why-the-rules-are-strict")
def test_the_class_fits_the_contract(subject: Subject, on_ranks: OnRanks) -> None:
    """Every hook is there, those of declared capabilities included, with exactly the contract's parameters; no other
    public method is.
    """
    (fault,) = on_ranks(SINGLE, fault_of_class, subject.settings())
    assert fault is None, fault


@dataclass
class Pass:
    """One call of `forward_backward_batch`, as a wrapper sees it."""

    forward_only: bool
    micro_batches: int
    calls: list[tuple[int, int]] = field(default_factory=list)
    """(chunk, micro-batch) of each `forward_micro_batch`."""
    odd: list[str] = field(default_factory=list)
    """Calls with another micro-batch than that of their index, or in another mode."""
    results: int | None = None
    attached: list[str] = field(default_factory=list)
    """What of the results holds on to a graph."""
    changed: list[str] = field(default_factory=list)
    """Fields of micro-batches that are not what they were."""

    def __str__(self) -> str:
        return "an inferring pass" if self.forward_only else "a training pass"


class Recorder:
    """A wrapper that records every pass."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._micro_batches: Sequence[Batch] = ()

    @hookimpl(wrapper=True)
    def forward_backward_batch(
        self, micro_batches: Sequence[Batch], forward_only: bool
    ) -> Generator[None, list[MicroResult] | None, list[MicroResult] | None]:
        here = Pass(forward_only, len(micro_batches))
        self.passes.append(here)
        self._micro_batches = micro_batches
        before = [_fields(one, copied=True) for one in micro_batches]
        results = yield
        here.changed = [
            f"{name} of micro-batch {index}"
            for index, (one, fields) in enumerate(zip(micro_batches, before, strict=True))
            for name in _differences(fields, _fields(one))
        ]
        if results is not None:
            here.results = len(results)
            here.attached = sorted({name for result in results for name in _attached(result)})
        return results

    @hookimpl(wrapper=True)
    def forward_micro_batch(
        self, chunk_index: int, index: int, micro_batch: Batch, forward_only: bool
    ) -> Iterator[None]:
        here = self.passes[-1]
        here.calls.append((chunk_index, index))
        known = range(len(self._micro_batches))
        if index not in known or not torch.equal(
            micro_batch["input_ids"].cpu(), self._micro_batches[index]["input_ids"].cpu()
        ):
            here.odd.append(f"index {index} comes with another micro-batch")
        if forward_only != here.forward_only:
            here.odd.append(f"index {index} comes with forward_only={forward_only}")
        return (yield)


def _fields(batch: Batch, *, copied: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {**batch.tokens, **batch.sequences, "cu_seqlens": batch.cu_seqlens, "meta": batch.meta}
    return {name: _copy(value) for name, value in found.items()} if copied else found


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else dict(value)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    gone = before.keys() ^ after.keys()
    return [*sorted(gone), *(name for name in before if name not in gone and not _same(before[name], after[name]))]


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, Tensor):
        return bool(before == after)
    return before.dtype == after.dtype and before.device == after.device and torch.equal(before, after)


def _attached(result: MicroResult) -> Iterator[str]:
    outputs = result.outputs.present() if result.outputs is not None else {}
    for kind, found in (("term", result.terms), ("output", outputs), ("metric", result.metrics)):
        yield from (f"{kind} {name}" for name, value in found.items() if value.requires_grad)


def _implementations(engine: Engine) -> dict[str, int]:
    """How many answer each hook: the engine and the wrappers around it."""
    return {name: len(getattr(engine._manager.hook, name).get_hookimpls()) for name in HOOKS}


@dataclass(frozen=True)
class Record:
    """What a rank saw in a step, an inference and an evaluation."""

    passes: list[Pass]
    chunks: int
    changed: list[str]
    """Fields of the batch that it gave."""
    more_wrappers: list[str]
    """Hooks with more around them than before."""


def record(folder: Path, settings: dict[str, Any]) -> Record:
    recorder = Recorder()
    with opened(folder, settings, wrappers=[recorder]) as engine:
        batch = share(engine, SAMPLES)
        fields, around = _fields(batch, copied=True), _implementations(engine)
        engine.train_batch(batch, SFTLoss())
        engine.infer_batch(batch)
        engine.infer_batch(batch, needs=(), loss=SFTLoss())
        return Record(
            recorder.passes,
            engine.describe()["layout"]["virtual_pipeline_parallel_size"],
            _differences(fields, _fields(batch)),
            [name for name, count in _implementations(engine).items() if count != around[name]],
        )


Records = Callable[[Layout], Sequence[Record]]


@pytest.fixture
def records(subject: Subject, once_on_ranks: OnRanks, model: Model) -> Records:
    """`records(layout)`: each rank's."""

    def run(layout: Layout) -> Sequence[Record]:
        settings = subject.settings(layout, micro_batch_size=1)
        return once_on_ranks(layout, record, model(subject.family_at(layout)), settings)

    return run


@clause("engines.contract:BaseEngine.forward_micro_batch")
def test_forward_micro_batch_runs_once_per_chunk_and_micro_batch(layout: Layout, records: Records) -> None:
    """The engine runs every forward through `ctx.hook.forward_micro_batch`, once for each of its chunks and each
    micro-batch, with that micro-batch and its index, in training and in inference: the seam on which tracing, replay
    and fault injection stand.
    """
    for rank, found in enumerate(records(layout)):
        for one in found.passes:
            expected = [(chunk, index) for chunk in range(found.chunks) for index in range(one.micro_batches)]
            assert sorted(one.calls) == expected, (
                f"{one} of {one.micro_batches} micro-batches through {found.chunks} chunks on rank {rank} called the "
                f"hook for these (chunk, micro-batch): {one.calls}"
            )
            assert not one.odd, f"{one} on rank {rank}: {one.odd}"


@clause("engines.contract:MicroResult")
def test_results_are_one_per_micro_batch_and_detached(layout: Layout, records: Records) -> None:
    """A rank that holds outputs returns a result for each micro-batch, fillers included, and the others return None;
    nothing in a result holds on to a graph.
    """
    every = records(layout)
    for place, passes in enumerate(zip(*(found.passes for found in every), strict=True)):
        assert any(one.results is not None for one in passes), f"no rank has results of {passes[0]} (number {place})"
        for rank, one in enumerate(passes):
            right = one.results in (None, one.micro_batches)
            assert right, f"{one} on rank {rank} gave {one.results} results for {one.micro_batches} micro-batches"
            assert not one.attached, f"{one} on rank {rank} gave results with a graph: {one.attached}"


@clause("contract.md#what-an-engine-leaves-behind")
def test_batches_are_not_changed(layout: Layout, records: Records) -> None:
    """Neither training nor inference writes into the batch, nor into the micro-batches that are cut from it."""
    for rank, found in enumerate(records(layout)):
        assert not found.changed, f"the batch given on rank {rank} was changed: {found.changed}"
        for one in found.passes:
            assert not one.changed, f"{one} on rank {rank} changed its micro-batches: {one.changed}"


@clause("contract.md#wrappers")
def test_no_wrapper_is_left(layout: Layout, records: Records) -> None:
    """An engine puts nothing around its own hooks for good: what is off is not there."""
    for rank, found in enumerate(records(layout)):
        assert not found.more_wrappers, f"rank {rank} has other wrappers than before around {found.more_wrappers}"


def wrap_one_of_two(folder: Path, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """After each of: nothing, a step of the other, one of its own, one without the wrapper: how many passes, and
    forwards, the wrapper of the first engine has seen.
    """
    recorder, passes, calls = Recorder(), [], []

    def note() -> None:
        passes.append(len(recorder.passes))
        calls.append(sum(len(one.calls) for one in recorder.passes))

    with opened(folder, settings, wrappers=[recorder]) as wrapped, opened(folder, settings) as bare:
        for engine in (bare, wrapped):
            train_step(engine, SAMPLES)
            note()
        wrapped.unwrap(recorder)
        train_step(wrapped, SAMPLES)
        note()
    return passes, calls


@clause("contract.md#wrappers")
def test_a_wrapper_belongs_to_one_engine(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """What is put around one engine sees nothing of another in the process, and nothing once it is taken off."""
    folder, settings = model(subject.families[0]), subject.settings(micro_batch_size=2)
    ((passes, calls),) = on_ranks(SINGLE, wrap_one_of_two, folder, settings)
    seen = "after a step of another engine, of its own, and of its own without the wrapper, the wrapper had seen"
    assert passes == [0, 1, 1], f"{seen} {passes} calls of forward_backward_batch"
    assert calls == [0, 2, 2], f"{seen} {calls} calls of forward_micro_batch"
