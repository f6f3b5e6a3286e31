"""Model folders, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engines.testing.tiny import tiny_folder
from support.megatron import LAYERS


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`deep(family, **overrides)`: a tiny model with as many layers as the layouts need, saved."""
    return cache(
        lambda family, **overrides: tiny_folder(
            tmp_path_factory.mktemp(family), family, **{"num_hidden_layers": LAYERS, **overrides}
        )
    )
