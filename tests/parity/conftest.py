"""Model folders and reference runs, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support import reference
from support.parity import OPTIMIZER
from support.reference import Run
from support.samples import mini_batches
from support.tiny import tiny_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(family)`: a tiny model, saved."""
    return cache(lambda family: tiny_folder(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def reference_run(folder: Callable[[str], Path]) -> Callable[..., Run]:
    """`reference_run(family, size, **settings)`: the reference on three mini-batches of `size` samples."""

    @cache
    def run(family: str, size: int, **settings: float) -> Run:
        return reference.train(folder(family), mini_batches(size), **{**OPTIMIZER, **settings})

    return run
