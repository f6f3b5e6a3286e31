from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.discovery import Discovery
from engines.process import Marks
from engines.registry import Registry
from support.fake_plugins import Venv, make_venv, plugin


@pytest.fixture(scope="session")
def clean_venv(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Core and one plugin that is as it should be."""
    made = make_venv(tmp_path_factory.mktemp("clean") / "venv")
    made.install([plugin("good")])
    return made


@pytest.fixture
def empty_registry() -> Registry:
    """A registry of a machine without plugins."""
    return Registry(discover=lambda: Discovery((), ()))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marks]:
    """A process in which no engine has been loaded yet."""
    import engines.process

    marks = Marks()
    for attribute in ("loaded", "environment", "prepared"):
        monkeypatch.setattr(engines.process.here, attribute, getattr(marks, attribute))
    yield marks


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ENGINES_DEVICE", "ENGINES_DENY", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
