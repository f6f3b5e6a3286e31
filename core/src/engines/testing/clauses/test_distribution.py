"""What people install is what was tested."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest
from build import ProjectBuilder, check_dependency

from engines.discovery.metadata import GROUP, Installed, installed
from engines.manifest import MANIFEST_NAME
from engines.registry import IN_PROCESS
from engines.testing.clause import clause
from engines.testing.subject import Subject


def not_distributed(subject: Subject) -> str | None:
    """Why there is no wheel of it."""
    return (
        "it is registered in its process, by no distribution"
        if subject.selection.distribution == IN_PROCESS
        else None
    )


def build_wheel(project: Path, folder: Path) -> Path:
    """Of the sources in `project`, with the build backend that is installed, else with a fetched one."""
    missing = [one for wanted in ProjectBuilder(project).build_system_requires for one in check_dependency(wanted)]
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(project)]
    done = subprocess.run(
        command if missing else [*command, "--no-isolation"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"its wheel can't be built from {project}:\n{done.stdout}{done.stderr}", pytrace=False)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _found(subject: Subject) -> Installed:
    (found,) = installed(subject.selection.distribution)
    return found


def assert_holds(wheel: Path, name: str, manifest: bytes, declared: EntryPoint) -> None:
    """The wheel has the manifest under its `name`, and declares the package that it lies in."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        assert name in held, (
            f"the wheel has no {name}: its build backend must be told that the file belongs to the package"
        )
        assert archive.read(name) == manifest, f"{name} in the wheel is not the one that was read here"
        (info,) = {one.partition("/")[0] for one in held if ".dist-info/" in one}
        points = PathDistribution(zipfile.Path(archive, f"{info}/")).entry_points
    assert declared in points, f"the wheel's entry points {list(points)} lack {declared}"


@clause("manifest.md#the-manifest", unless=not_distributed)
def test_the_wheel_holds_the_manifest(subject: Subject, tmp_path: Path) -> None:
    """A wheel of the distribution names its package in the entry points of the group `engines`, and holds the
    `engine.toml` of that package as it was read here; an engine without it is found by nobody.
    """
    found, manifest = _found(subject), Path(subject.selection.manifest)
    name = f"{manifest.parent.name}/{MANIFEST_NAME}"
    if found.project is None:
        assert found.records(name), f"{found.name} {found.version} was installed without {name}"
        return
    declared = EntryPoint(subject.selection.plugin, manifest.parent.name, GROUP)
    assert_holds(build_wheel(Path(found.project), tmp_path), name, manifest.read_bytes(), declared)
