"""Fixtures of the kit's clauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines.testing import plain
from engines.testing.collecting import subject_of
from engines.testing.layouts import Layout
from engines.testing.runs import OPTIMIZER
from engines.testing.samples import mini_batches
from engines.testing.subject import LAYERS, Subject
from engines.testing.tiny import tiny_folder
from engines.testing.world import WorldError, Worlds

OnRanks = Callable[..., list[Any]]
Model = Callable[..., Path]
PlainRun = Callable[..., plain.Run]


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """The engine under test."""
    return subject_of(request.node)


@pytest.fixture(scope="session")
def kit_worlds() -> Iterator[Worlds]:
    """The processes in which engines run, kept until the session ends."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture
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


@pytest.fixture(scope="module")
def kit_answers() -> dict[str, list[Any]]:
    """What `once_on_ranks` keeps."""
    return {}


@pytest.fixture
def once_on_ranks(on_ranks: OnRanks, kit_answers: dict[str, list[Any]]) -> OnRanks:
    """`on_ranks` for clauses of a chapter that look at the same run: it takes place once."""

    def run(layout: Layout, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        key = f"{layout}: {function.__qualname__}{arguments}"
        if key not in kit_answers:
            kit_answers[key] = on_ranks(layout, function, *arguments)
        return kit_answers[key]

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """`model(family)`: a tiny model, saved."""
    return cache(
        lambda family, **overrides: tiny_folder(
            tmp_path_factory.mktemp(family), family, **{"num_hidden_layers": LAYERS, **overrides}
        )
    )


@pytest.fixture(scope="session")
def plain_run(model: Model) -> PlainRun:
    """`plain_run(family, size, **settings)`: plain transformers and PyTorch on three mini-batches of `size` samples;
    `settings` are the optimizer's.
    """
    return cache(
        lambda family, size=8, **settings: plain.train(model(family), mini_batches(size), **{**OPTIMIZER, **settings})
    )
