"""Modules found as an import would find them, without what an import runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from engines.discovery import find_module, is_namespace


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages whose code must not run, in ordinary and namespace packages, three deep."""
    files = ["loud/__init__.py", "loud/chip.py", "loud/deep/__init__.py", "loud/deep/core.py", "space/inner/code.py"]
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('this must not run')\n" if "__init__" in name else "")
    (tmp_path / "space" / "inner" / "more").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dotted", ["loud", "loud.chip", "loud.deep", "loud.deep.core", "space.inner.code"])
def test_found_without_importing_its_parents(tree: Path, dotted: str) -> None:
    before = set(sys.modules)
    spec = find_module(dotted)
    assert spec is not None
    assert Path(spec.origin or "").is_relative_to(tree)
    assert not {name for name in set(sys.modules) - before if name.startswith(("loud", "space"))}


@pytest.mark.parametrize("dotted", ["absent", "loud.absent", "loud.chip.below", "absent.chip", "space.inner.absent"])
def test_not_found(tree: Path, dotted: str) -> None:
    assert find_module(dotted) is None


def test_namespaces_are_told_apart(tree: Path) -> None:
    for dotted in ("space", "space.inner", "space.inner.more"):
        spec = find_module(dotted)
        assert spec is not None
        assert is_namespace(spec), dotted
    loud = find_module("loud")
    assert loud is not None
    assert not is_namespace(loud)


def test_a_blocked_module_is_not_found(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "loud", None)
    assert find_module("loud") is None
    assert find_module("loud.chip") is None


def test_built_in_and_frozen_modules_are_not_namespaces() -> None:
    for dotted in ("sys", "zipimport", "email.parser", "xml.etree.ElementTree"):
        spec = find_module(dotted)
        assert spec is not None
        assert not is_namespace(spec)


def test_agrees_with_importlib_in_a_fresh_process() -> None:
    """The independent reference: importlib's own answer, which imports the parents."""
    names = ["json.decoder", "pydantic.fields", "os.path", "concurrent.futures.thread", "pip._internal", "click"]
    code = "import sys; from engines.discovery import find_module as f; print([f(n).origin for n in sys.argv[1:]])"
    ended = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    expected = [getattr(importlib.util.find_spec(name), "origin", None) for name in names]
    assert ended.stdout.strip() == str(expected)
