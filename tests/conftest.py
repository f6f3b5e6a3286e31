"""Fixtures that every room of tests shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(n)`: n persistent gloo processes (see `support.world`)."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        return worlds.setdefault(size, World(size))

    yield get
    for one in worlds.values():
        one.close()
