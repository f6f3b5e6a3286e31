"""The kit's clause about what is distributed, held against wheels that lack it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from engines.testing.clauses.test_distribution import assert_holds, build_wheel

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "engines-mine"
version = "1"

[project.entry-points.{group}]
mine = "engines_mine"

[tool.hatch.build]
exclude = [{excluded!r}]
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("group", "excluded", "says"),
    [
        ("engines", "engine.toml", "has no engines_mine/engine.toml"),
        ("others", "nothing", "entry points .* lack"),
    ],
)
def test_a_wheel_that_nobody_finds_is_caught(tmp_path: Path, group: str, excluded: str, says: str) -> None:
    package = tmp_path / "engines_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.toml").write_text("api = 1")
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(group=group, excluded=excluded))
    wheel = build_wheel(tmp_path, tmp_path / "wheels")
    declared = EntryPoint("mine", "engines_mine", "engines")
    with pytest.raises(AssertionError, match=says):
        assert_holds(wheel, "engines_mine/engine.toml", b"api = 1", declared)
