"""Dropout is on where an engine trains and off where it infers, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from engines.contract import Mode, hookimpl
from engines.losses import SFTLoss
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import Layout
from engines.testing.live import opened, share
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject

SAMPLES = mini_batches()[0][:4]
TRAINING: tuple[str, Mode] = ("in train_batch", "train")
INFERRING: tuple[str, Mode] = ("in infer_batch", "eval")


class Interrupted(Exception):
    """What ends a context in the middle."""


@dataclass(frozen=True)
class Look:
    """At the modules that run, at one place of a program."""

    where: str
    wanted: Mode
    strays: frozenset[str]
    """Classes of modules in the other mode."""


@dataclass(eq=False)
class Watch:
    """A wrapper that knows which modules run, and looks at them whenever a micro-batch has run or somebody asks."""

    passes: list[Look] = field(default_factory=list)
    """Inside of them."""
    between: list[Look] = field(default_factory=list)
    chunks: set[int] = field(default_factory=set)
    modules: set[Module] = field(default_factory=set)

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Module, chunk_index: int, forward_only: bool) -> Iterator[None]:
        running = {chunk}
        watching = register_module_forward_pre_hook(lambda module, _: running.add(module))
        try:
            result = yield
        finally:
            watching.remove()
        self.chunks.add(chunk_index)
        self.modules |= running
        wanted: Mode = "eval" if forward_only else "train"
        self.passes.append(
            Look("in infer_batch" if forward_only else "in train_batch", wanted, _strays(running, wanted))
        )
        return result

    def look(self, where: str, wanted: Mode) -> None:
        """Between passes."""
        self.between.append(Look(where, wanted, _strays(self.modules, wanted)))


def _strays(modules: set[Module], wanted: Mode) -> frozenset[str]:
    return frozenset(type(module).__name__ for module in modules if module.training != (wanted == "train"))


@dataclass(frozen=True)
class Seen:
    """What a rank saw."""

    passes: list[Look]
    between: list[Look]
    chunks_that_ran: int
    chunks: int


def change_modes(folder: Path, settings: dict[str, Any]) -> Seen:
    watch = Watch()
    with opened(folder, settings, wrappers=[watch]) as engine:
        batch = share(engine, SAMPLES)
        engine.infer_batch(batch)
        watch.look("after initialize and infer_batch", "eval")
        with engine.train_mode():
            watch.look("in train_mode", "train")
            with engine.eval_mode():
                watch.look("in eval_mode inside train_mode", "eval")
                with engine.train_mode():
                    watch.look("in train_mode inside eval_mode", "train")
                watch.look("after an inner train_mode in eval_mode", "eval")
            watch.look("after an inner eval_mode in train_mode", "train")
            with engine.train_mode():
                pass
            watch.look("after an inner train_mode in train_mode", "train")
            engine.infer_batch(batch)
            watch.look("after infer_batch in train_mode", "train")
            with suppress(Interrupted), engine.eval_mode():
                raise Interrupted
            watch.look("after an exception in an inner eval_mode", "train")
        watch.look("after train_mode", "eval")
        with suppress(Interrupted), engine.train_mode():
            raise Interrupted
        watch.look("after an exception in train_mode", "eval")
        engine.train_batch(batch, SFTLoss())
        watch.look("after train_batch", "eval")
        chunks = engine.describe()["layout"]["virtual_pipeline_parallel_size"]
        return Seen(watch.passes, watch.between, len(watch.chunks), chunks)


def _check(looks: Sequence[Look], rank: int) -> None:
    for look in looks:
        other = "eval" if look.wanted == "train" else "train"
        assert not look.strays, f"{look.where}, on rank {rank}, modules are in {other} mode: {sorted(look.strays)}"


@clause("contract.md#why-the-rules-are-strict")
def test_modes_nest_and_are_restored(
    subject: Subject, some_layout: Layout, once_on_ranks: OnRanks, model: Model
) -> None:
    """`train_mode()` and `eval_mode()` hold inside and restore what was before: nested, after exceptions, and after a
    batch that brought a mode of its own.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    for rank, seen in enumerate(once_on_ranks(some_layout, change_modes, folder, settings)):
        _check(seen.between, rank)


@clause("engines.contract:BaseEngine.set_mode")
def test_modes_reach_every_module_that_runs(
    subject: Subject, some_layout: Layout, once_on_ranks: OnRanks, model: Model
) -> None:
    """The modes "train" and "eval" reach every chunk and every module that runs: in training they are in the one, in
    inference in the other, whatever mode was set.
    """
    folder, settings = model(subject.family_at(some_layout)), subject.settings(some_layout)
    for rank, seen in enumerate(once_on_ranks(some_layout, change_modes, folder, settings)):
        assert seen.chunks_that_ran == seen.chunks, f"rank {rank}: {seen.chunks_that_ran} of {seen.chunks} chunks ran"
        _check(seen.passes, rank)
