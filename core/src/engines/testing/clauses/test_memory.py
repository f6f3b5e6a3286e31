"""Memory is given back: of a micro-batch when the next one comes, of a step when it is done."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from engines.batch import TokenOutputs
from engines.contract import hookimpl
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.live import live_bytes, opened, train_step
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject

FIRST = mini_batches()[0]
LETS_GO_S = 0.2
EARLY, LATE = 10, 50
"""The steps after which memory is measured."""
GROWTH = 1.02
LONG = [FIRST[2], FIRST[4]]
"""Samples whose graph, kept at every step, would show."""


class Watch:
    """A wrapper with weak references to whatever has a graph and comes out of a module, or of a chunk."""

    def __init__(self) -> None:
        self.seen: list[list[weakref.ref[Tensor]]] = []
        """By forward."""
        self.alive: list[int] = []
        """How many earlier forwards had something alive when the next one came."""

    @hookimpl(wrapper=True)
    def forward_micro_batch(self) -> Iterator[None]:
        self.alive.append(self.count())
        made: list[weakref.ref[Tensor]] = []
        self.seen.append(made)
        watching = register_module_forward_hook(lambda _, __, output: made.extend(map(weakref.ref, _graphs(output))))
        try:
            result = yield
        finally:
            watching.remove()
        made.extend(map(weakref.ref, _graphs(result)))
        return result

    def count(self) -> int:
        """Forwards of which something is alive, and stays so: gloo's threads let go of what they moved later."""
        deadline = time.monotonic() + LETS_GO_S
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return alive

    def _alive(self) -> int:
        return sum(any(one() is not None for one in made) for made in self.seen)


def _graphs(found: Any) -> Iterator[Tensor]:
    """The tensors with a graph in what a module returns."""
    if isinstance(found, Tensor):
        if found.grad_fn is not None:
            yield found
    elif isinstance(found, TokenOutputs):
        yield from _graphs(list(found.present().values()))
    elif isinstance(found, Mapping):
        yield from _graphs(list(found.values()))
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _graphs(one)


def _pipeline(layout: Layout) -> tuple[int, int]:
    """Stages, and chunks of each."""
    settings = layout.settings
    return settings.get("pipeline_parallel_size", 1), settings.get("virtual_pipeline_parallel_size", 1)


def watch_a_step(folder: Path, settings: dict[str, Any]) -> tuple[list[int], int, int]:
    """Forwards alive when each began, after the step, and how many made anything with a graph."""
    watch = Watch()
    with opened(folder, settings, wrappers=[watch]) as engine:
        train_step(engine, FIRST)
        return watch.alive, watch.count(), sum(map(bool, watch.seen))


@clause("contract.md#what-an-engine-leaves-behind")
def test_graphs_die_with_their_micro_batch(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """When a micro-batch begins, outputs and activations of those before it are gone, save what a pipeline has on its
    way; after the step all are.
    """
    stages, chunks = _pipeline(some_layout)
    on_their_way = 2 * stages * chunks if stages > 1 else 0
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout, micro_batch_size=1)
    for rank, (alive, after, made) in enumerate(on_ranks(some_layout, watch_a_step, folder, settings)):
        assert made > on_their_way + 1, f"{made} forwards on rank {rank} made a graph, too few to tell anything"
        assert max(alive) <= on_their_way, (
            f"when forwards began on rank {rank}, so many earlier ones had living outputs or activations: {alive}"
        )
        assert after == 0, f"after the step, outputs or activations of {after} forwards live on rank {rank}"


def train_long(folder: Path, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Private bytes of the process, and bytes in tensors, after the early and the late step."""
    measured = []
    with opened(folder, settings) as engine:
        for step in range(1, LATE + 1):
            train_step(engine, LONG)
            if step in (EARLY, LATE):
                measured.append((_private_bytes(), live_bytes()))
    return measured


def _private_bytes() -> int:
    """What of the resident memory is this process's own, once the allocator has given back what is free."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    private: int = psutil.Process().memory_full_info().uss
    return private


@clause("contract.md#what-an-engine-leaves-behind")
def test_memory_does_not_grow(subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """After 50 steps a process holds at most 2 % more memory than after 10: nothing of a step outlives it."""
    stages, chunks = _pipeline(some_layout)
    folder = model(subject.family_at(some_layout), num_hidden_layers=stages * chunks)
    settings = subject.settings(some_layout, micro_batch_size=2)
    for rank, measured in enumerate(on_ranks(some_layout, train_long, folder, settings)):
        for what, early, late in zip(("private memory", "tensors"), *measured, strict=True):
            assert late <= GROWTH * early, (
                f"rank {rank} has {early} bytes of {what} after {EARLY} steps and {late} after {LATE}, "
                f"{late / early - 1:.1%} more"
            )
