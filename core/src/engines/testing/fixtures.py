"""Fixtures of the kit's clauses.

Those that all engines of a session share are pytest's for everybody, and called `kit_...`. The others have names that
an author may use too: they are seen by the kit's own tests alone, which in turn see no others of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines.testing import plain
from engines.testing.layouts import Layout
from engines.testing.runs import OPTIMIZER
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.testing.tiny import tiny_folder
from engines.testing.world import WorldError, Worlds

OnRanks = Callable[..., list[Any]]
Model = Callable[..., Path]
PlainRun = Callable[..., plain.Run]


@pytest.fixture(scope="session")
def kit_worlds() -> Iterator[Worlds]:
    """The processes in which engines run, kept until the session ends."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def kit_models(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """What `model` has, by all settings."""
    return cache(lambda family, **settings: tiny_folder(tmp_path_factory.mktemp(family), family, **settings))


@pytest.fixture(scope="session")
def kit_plain_runs(kit_models: Model) -> PlainRun:
    """What `plain_run` has, by the model's number of layers too."""
    return cache(
        lambda family, layers, size=8, **settings: plain.train(
            kit_models(family, num_hidden_layers=layers), mini_batches(size), **{**OPTIMIZER, **settings}
        )
    )


@pytest.fixture(scope="module")
def kit_answers() -> dict[str, list[Any]]:
    """What `once_on_ranks` keeps."""
    return {}


def on_ranks(subject: Subject, kit_worlds: Worlds) -> OnRanks:
    """`on_ranks(layout, function, *arguments)`: what each rank of a layout's world returns."""

    def run(layout: Layout, function: Callable[..., Any], *arguments: Any, **more: Any) -> list[Any]:
        world = kit_worlds.get(layout.processes, subject.selection, subject.setup)
        try:
            return world(function, *arguments, **more)
        except WorldError as error:
            said = str(error)
        pytest.fail(said, pytrace=False)  # out here, where pytest doesn't tell the error a second time

    return run


def once_on_ranks(on_ranks: OnRanks, kit_answers: dict[str, list[Any]]) -> OnRanks:
    """`on_ranks` for clauses of a chapter that look at the same run: it takes place once."""

    def run(layout: Layout, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        key = f"{layout}: {function.__qualname__}{arguments}"
        if key not in kit_answers:
            kit_answers[key] = on_ranks(layout, function, *arguments)
        return kit_answers[key]

    return run


def model(subject: Subject, kit_models: Model) -> Model:
    """`model(family, **settings)`: a tiny model, saved; `settings` are those of its config.json."""
    return lambda family, **settings: kit_models(family, **{"num_hidden_layers": subject.layers, **settings})


def plain_run(subject: Subject, kit_plain_runs: PlainRun) -> PlainRun:
    """`plain_run(family, size, **settings)`: plain transformers and PyTorch on three mini-batches of `size` samples;
    `settings` are the optimizer's.
    """
    return lambda family, *size, **settings: kit_plain_runs(family, subject.layers, *size, **settings)


def register(node: pytest.Collector, found: Subject) -> None:
    """Let the tests below `node`, and no others, see the fixtures whose names anybody may use."""

    def subject() -> Subject:
        """The engine under test."""
        return found

    for fixture in (subject, on_ranks, once_on_ranks, model, plain_run):
        pytest.register_fixture(name=fixture.__name__, func=fixture, node=node)
