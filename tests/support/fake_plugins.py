"""Fake engine plugins that are really installed: wheels built by hand, put by pip into a venv without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import importlib_metadata
from packaging.requirements import Requirement

REPO = Path(__file__).parents[2]

ENGINE = "class Engine:\n    pass\n\n\nclass Config:\n    pass\n"


def manifest(package: str, backend: str, *, head: str = "", tail: str = "", **keys: str) -> str:
    """An `engine.toml` with one engine on the cpu; `keys` are written as they are into [[engine]]."""
    entry = {
        "backend": f'["{backend}"]',
        "model_type": '["language_model"]',
        "device": '["cpu"]',
        "engine": f'"{package}.engine:Engine"',
        "config": f'"{package}.engine:Config"',
    } | keys
    lines = ["api = 1", f'summary = "The {backend} of a test"', head, "[[engine]]"]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in entry.items()), tail]) + "\n"


@dataclass(frozen=True)
class FakePlugin:
    """A distribution to be built: its name, the entry point that it declares (none if it is empty), and its files."""

    distribution: str
    entry_point: str
    value: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    version: str = "1.0"
    generator: str = "hatchling 1.27"
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()

    @property
    def dist_info(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}.dist-info"

    def build(self, folder: Path) -> Path:
        """Write its wheel into `folder`."""
        metadata = [f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {self.version}\n"]
        metadata += [f"Requires-Dist: {requirement}\n" for requirement in self.requires]
        metadata += [f"Provides-Extra: {extra}\n" for extra in self.extras]
        contents = dict(self.files) | {
            f"{self.dist_info}/METADATA": "".join(metadata),
            f"{self.dist_info}/WHEEL": (
                f"Wheel-Version: 1.0\nGenerator: {self.generator}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            ),
        }
        if self.entry_point:
            contents[f"{self.dist_info}/entry_points.txt"] = f"[engines]\n{self.entry_point} = {self.value}\n"
        record = f"{self.dist_info}/RECORD"
        contents[record] = "".join(f"{name},,\n" for name in [*contents, record])
        path = folder / f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
        return path


def plugin(name: str, text: str | bytes | None = None, *, code: str = ENGINE, **fields: object) -> FakePlugin:
    """The distribution `engines-NAME` with the package `fake_NAME`, its engine in `fake_NAME/engine.py`."""
    package = f"fake_{name}"
    if text is None:
        text = manifest(package, name)
    # The package's own code must never run before its engine is loaded, so it leaves a trace.
    files: dict[str, str | bytes] = {
        f"{package}/__init__.py": "import sys\nsys.ran_fake_code = True\n",
        f"{package}/engine.py": code,
        f"{package}/engine.toml": text,
    }
    values = {"distribution": f"engines-{name}", "entry_point": name, "value": package, "files": files} | fields
    return FakePlugin(**values)  # type: ignore[arg-type]


def library(name: str, version: str = "1.0", requires: tuple[str, ...] = (), **fields: object) -> FakePlugin:
    """A distribution without engines, for others to require."""
    return FakePlugin(name, "", "", version=version, requires=requires, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Venv:
    """A venv that holds core, what core requires, and nothing else but what is installed into it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def install(self, plugins: Iterable[FakePlugin]) -> None:
        """Install all at once with pip."""
        wheels = self.folder / "wheels"
        wheels.mkdir(exist_ok=True)
        paths = [str(one.build(wheels)) for one in plugins]
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([*pip, *options, *paths], check=True)

    def unpack(self, plugins: Iterable[FakePlugin]) -> None:
        """Put their files where pip would, and ask nothing: pip refuses metadata that it cannot read."""
        for one in plugins:
            zipfile.ZipFile(one.build(self.folder)).extractall(self.site)

    def engines(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command `engines` as its script would, in a folder that holds nothing."""
        code = "import sys; from engines.cli.main import main; sys.exit(main())"
        return self.run("-P", "-c", code, *words, **env)

    def code(self, text: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python code."""
        return self.run("-P", "-c", textwrap.dedent(text), **env)

    def run(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ENGINES_", "PYTHON"))}
        return subprocess.run(
            [str(self.python), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=cwd or self.folder,
            env=environment | env,
        )


def make_venv(folder: Path) -> Venv:
    """A venv with core (from its sources) and links to what core requires, made in a second."""
    venv.create(folder, with_pip=False)
    made = Venv(folder)
    for name in _required("engines-core"):
        dist = importlib_metadata.distribution(name)
        for top in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
            link = made.site / top
            if not link.exists():
                link.symlink_to(os.path.abspath(str(dist.locate_file(top))))
    core = importlib_metadata.distribution("engines-core")
    dist_info = next(file for file in core.files or () if file.name == "METADATA").parent
    (made.site / dist_info.name).symlink_to(os.path.abspath(str(core.locate_file(dist_info))))
    (made.site / "core.pth").write_text(str(REPO / "core" / "src"))
    return made


def _required(name: str) -> set[str]:
    """Names of the installed distributions that `name` requires, directly or not, extras left out."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in importlib_metadata.requires(waiting.pop()) or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found
