"""Model folders, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from engines.testing.tiny import tiny_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folder(family)`: a tiny model, saved."""
    return cache(lambda family: tiny_folder(tmp_path_factory.mktemp(family), family))
