"""Wheels of the repo's distributions, and venvs outside it that hold them and exactly what they require."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.fake_plugins import Venv

REPO = Path(__file__).parents[2]
PROJECTS = [REPO / "core", *sorted(file.parent for file in REPO.glob("plugins/*/pyproject.toml"))]


def build_wheel(project: Path, folder: Path) -> Path:
    """Build the wheel of the distribution in `project` into `folder`, with the backend that is installed."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def wheel_metadata(wheel: Path) -> metadata.Distribution:
    """The metadata that `wheel` would be installed with."""
    (info,) = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" in name}
    return metadata.PathDistribution(zipfile.Path(wheel, f"{info}/"))


def install_wheels(folder: Path, wheels: Iterable[Path], extras: Iterable[str] = ()) -> Venv:
    """A venv in `folder` with `wheels` installed by pip, and links to the installed packages that they require.

    `extras` are those of the wheels themselves. What they don't require isn't there, so a requirement that a
    distribution forgot to declare shows as an import that fails. No package is copied and none is downloaded.
    """
    wheels = list(wheels)
    venv.create(folder, with_pip=False)
    made = Venv(folder)
    command = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "--quiet", "--no-deps"]
    options = ["--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, *options, *map(str, wheels)], check=True)
    for package in required_packages(wheels, extras):
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            link = made.site / top
            if not link.exists():
                link.symlink_to(os.path.abspath(str(package.locate_file(top))))
    return made


def required_packages(wheels: Iterable[Path], extras: Iterable[str] = ()) -> list[metadata.Distribution]:
    """Installed distributions that `wheels` require, directly or not; a wheel stands for its own distribution."""
    own = {canonicalize_name(found.metadata["Name"]): found for found in map(wheel_metadata, wheels)}
    waiting = [Requirement(f"{name}[{','.join(extras)}]") for name in own]
    reached: dict[tuple[str, str], metadata.Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in reached:
                continue
            found = own[name] if name in own else metadata.distribution(name)
            reached[name, extra] = found
            waiting += _asked_by(found, extra)
    return [found for (name, _), found in reached.items() if name not in own]


def _asked_by(package: metadata.Distribution, extra: str) -> list[Requirement]:
    """What `package` requires under `extra`; an extra that it doesn't have asks for nothing."""
    requirements = map(Requirement, package.requires or ())
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": extra})]
