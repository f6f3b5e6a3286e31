"""A tiny model and data, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.testing.tiny import tiny_folder
from support.work_folder import fill


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama without tokenizer."""
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def work(tmp_path: Path, model: Path) -> Path:
    """A folder with `model` and `data.jsonl`; see `fill`."""
    return fill(tmp_path, model)
