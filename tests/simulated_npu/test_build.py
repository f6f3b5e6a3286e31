"""The extension is built once, and what is missing for it has a name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from simulated_npu import build


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build, "_search_path", lambda: str(tmp_path))


def test_what_is_missing_is_named(without_tools: None) -> None:
    with pytest.raises(build.ToolMissing, match=r"g\+\+.* and ninja"):
        build.library()


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_setup_names_it_and_only_ci_fails(
    without_tools: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, code: int
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("sys.argv", ["build.py", "--check"])
    assert build.main() == code
    said = capsys.readouterr().out
    assert "install g++" in said
    assert "pip install ninja" in said


def test_once_for_many_who_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds = []

    def compile_it(work: Path, built: Path) -> None:
        builds.append(built)
        built.touch()

    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build, "missing_tools", lambda: None)
    monkeypatch.setattr(build, "_build", compile_it)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: build.library(), range(4)))
    assert builds == list(found)


def test_another_source_is_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in build.SOURCES.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = build._key()
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key() == before
    (tmp_path / "host.cpp").write_text("int change;\n")
    assert build._key() != before
    monkeypatch.setattr(build, "version", lambda _: "3.0")
    assert "torch-3.0" in build._key()


def test_the_compilers_words_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build, "_COMPILE", "import sys; sys.exit('error: no such type')")
    monkeypatch.setattr("sys.argv", ["build.py"])
    with pytest.raises(RuntimeError, match="no such type"):
        build.main()
