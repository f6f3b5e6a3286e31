"""Model folders and reference runs, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines.testing import plain
from engines.testing.plain import Run
from engines.testing.runs import OPTIMIZER
from engines.testing.samples import mini_batches
from engines.testing.tiny import tiny_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder(family, **overrides)`: a tiny model, saved."""
    return cache(lambda family, **overrides: tiny_folder(tmp_path_factory.mktemp(family), family, **overrides))


@pytest.fixture(scope="session")
def reference_run(folder: Callable[..., Path]) -> Callable[..., Run]:
    """`reference_run(family, size, **settings)`: the reference on three mini-batches of `size` samples.

    `num_hidden_layers` and `pad_token_id` are the model's; other settings are the optimizer's.
    """

    @cache
    def run(family: str, size: int, **settings: Any) -> Run:
        model = {name: settings.pop(name) for name in ("num_hidden_layers", "pad_token_id") if name in settings}
        return plain.train(folder(family, **model), mini_batches(size), **{**OPTIMIZER, **settings})

    return run
