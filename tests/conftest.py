"""Fixtures that every room of tests shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.devices import CPU, NPU, DeviceSpec
from engines.testing.world import World

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""The models are so small that a second thread only waits for the first; many times slower on a busy machine."""


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(n)`: n persistent gloo processes (see `engines.testing.world`)."""
    yield from _worlds(CPU)


@pytest.fixture(scope="session")
def simulated_npu() -> Path:
    """The simulated device's library, built. Without the tools for that, tests are skipped; in CI they fail."""
    from simulated_npu.build import ToolMissing, library

    try:
        return library()
    except ToolMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def npu_world(simulated_npu: Path) -> Iterator[Callable[[int], World]]:
    """`npu_world(n)`: n persistent processes with a simulated NPU each."""
    from simulated_npu.installing import SITE

    yield from _worlds(NPU, SITE)


PRELOAD = (
    "engines_fsdp.engine",
    "megatron.core.optimizer",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel",
    "transformers.models.gpt2.modeling_gpt2",
)


def _worlds(device: DeviceSpec, *path: str) -> Iterator[Callable[[int], World]]:
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        return worlds.setdefault(size, World(size, device, path=path, preload=PRELOAD))

    yield get
    for one in worlds.values():
        one.close()
