"""Fixtures that every room of tests shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from support.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""The models are so small that a second thread only waits for the first; many times slower on a busy machine."""


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(n)`: n persistent gloo processes (see `support.world`)."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        return worlds.setdefault(size, World(size))

    yield get
    for one in worlds.values():
        one.close()
