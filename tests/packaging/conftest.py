from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_plugins import Venv
from support.wheels import PROJECTS, build_wheel, install_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of every distribution of the repo, by the name of its folder: core, fsdp, ..."""
    folder = tmp_path_factory.mktemp("wheels")
    return {project.name: build_wheel(project, folder) for project in PROJECTS}


@pytest.fixture(scope="session")
def core_alone(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A venv with core and what it requires: no torch, no plugin."""
    return install_wheels(tmp_path_factory.mktemp("core-alone") / "venv", [wheels["core"]])


@pytest.fixture(scope="session")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A venv with core, every plugin, and what they require."""
    return install_wheels(tmp_path_factory.mktemp("installed") / "venv", wheels.values())
