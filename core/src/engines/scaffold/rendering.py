"""The files of a new plugin: templates, and the source of `ReferenceEngine` under the plugin's own names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from string import Template

from engines.scaffold.naming import Names
from engines.testing.reference import REFERENCE

REFERENCE_PACKAGE = "engines.testing.reference"
SOURCES = ("config.py", "engine.py", "model.py")
"""Modules of `ReferenceEngine` of which the plugin gets a copy."""
TEMPLATES = {
    ".github/workflows/ci.yml": ("ci.yml",),
    ".gitignore": ("gitignore",),
    "README.md": ("README.md",),
    "pyproject.toml": ("pyproject.toml",),
    "src/{package}/__init__.py": ("__init__.py",),
    "src/{package}/engine.toml": ("engine.toml",),
    "src/{package}/py.typed": (),
    "tests/test_conformance.py": ("test_conformance.py",),
}
"""Each file, and the templates that it is made of, one after another."""
WITH_DEVICE = {
    "README.md": ("README.md", "README-device.md"),
    "src/{package}/engine.toml": ("engine.toml", "device.toml"),
    "tests/conftest.py": ("conftest.py",),
}
"""What is made otherwise for a device that the plugin describes itself."""


def render(names: Names) -> dict[str, str]:
    """Every file of the plugin, by its path in the distribution's folder."""
    templates = {**TEMPLATES, **WITH_DEVICE} if names.has_own_device else TEMPLATES
    words = _words(names)
    rendered = {
        path.format(package=names.package): "".join(_template(part).substitute(words) for part in parts)
        for path, parts in templates.items()
    }
    return rendered | {f"src/{names.package}/{module}": _source(module, names) for module in SOURCES}


def _words(names: Names) -> dict[str, str]:
    asked = json.dumps(names.backend)
    if names.has_own_device:
        asked += f", device={json.dumps(names.device)}"
    return {
        "backend": names.backend,
        "device": names.device,
        "distribution": names.distribution,
        "package": names.package,
        "stem": names.stem,
        "asked": asked,
        "model_types": _list(REFERENCE["model_type"]),
        "capabilities": _list(REFERENCE["capabilities"]),
        "needs": _list(REFERENCE["needs"]),
    }


def _list(words: Iterable[str]) -> str:
    """As TOML writes it."""
    return json.dumps(list(words))


def _template(name: str) -> Template:
    return Template(files(__package__).joinpath("template", f"{name}.in").read_text("utf-8"))


def _source(module: str, names: Names) -> str:
    """A module of `ReferenceEngine`, so that what an author starts from is what the kit is proven on.

    Two substitutions: the package, and what the names of its classes begin with.
    """
    text = files(REFERENCE_PACKAGE).joinpath(module).read_text("utf-8")
    text = text.replace(REFERENCE_PACKAGE, names.package)
    for kind in ("Engine", "Config"):
        text = text.replace(f"Reference{kind}", f"{names.stem}{kind}")
    return text
