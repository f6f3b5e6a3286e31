"""Processes in which MindSpeed's stand-in patches the real Megatron-Core for simulated NPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from engines.devices import NPU
from engines.testing.world import World
from simulated_npu.installing import SITE
from support.mindspeed import make_site


@pytest.fixture(scope="session")
def npus(simulated_npu: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two processes with an NPU each. They start with nothing imported: Megatron-Core must come after MindSpeed."""
    site = make_site(tmp_path_factory.mktemp("npus") / "site", torch_npu=None)
    world = World(2, NPU, start="spawn", path=[SITE, site])
    yield world
    world.close()


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`deep(family)`: a tiny model with as many layers as the layouts need, saved."""
    from engines.testing.tiny import tiny_folder
    from support.megatron import LAYERS

    return cache(lambda family: tiny_folder(tmp_path_factory.mktemp(family), family, num_hidden_layers=LAYERS))
