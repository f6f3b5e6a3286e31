"""An engine is available only where what its distribution requires is installed, in the versions that it declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.fake_plugins import FakePlugin, Venv, library, make_venv, manifest, plugin

LIBRARIES = [
    library(
        "lib-rary",
        "1.5",
        (
            "absent-of-its-own",
            'absent-fast>=3; extra == "fast"',
            'lib-rary[circle]; extra == "circle"',
            'lib-rary[fast]; extra == "all"',
            'old-library>=9; extra == "all" and sys_platform == "elsewhere"',
        ),
        extras=("fast", "circle", "all"),
    ),
    library("local-build", "2.13.0+cpu"),
    library("pre-release", "2.0rc1"),
]

MET = {
    "range": ["lib-rary>=1,<2"],
    "no range": ["lib-rary"],
    "another spelling": ["Lib_Rary>=1.5"],
    "marker for elsewhere": ['absent; sys_platform == "elsewhere"', 'lib-rary>=9; python_version < "3"'],
    "marker for here": ['lib-rary>=1; python_version >= "3"'],
    "an extra that nobody asks for": ['absent; extra == "more"'],
    "what requirements require for themselves": ["lib-rary>=1"],
    "an extra in a circle": ["lib-rary[circle]"],
    "an extra that it does not provide": ["lib-rary[nonsense]"],
    "a local version": ["local-build>=2.13", "local-build==2.13.0", "local-build<=2.13.0", "local-build==2.13.0+cpu"],
    "a pre-release": ["pre-release>=1"],
    "core": ["engines-core>=0.0.1"],
    "a folder": ["lib-rary @ file:///somewhere"],
}

UNMET = {
    "absent": (["absent"], "needs absent, not installed", 'pip install "absent"'),
    "absent in a range": (
        ['absent<3,!=2.5,>=2; python_version >= "3"'],
        "needs absent>=2,!=2.5,<3, not installed",
        'pip install "absent>=2,!=2.5,<3"',
    ),
    "too old": (["lib-rary>=1.6,<2"], "needs lib-rary>=1.6,<2, found 1.5", 'pip install "lib-rary>=1.6,<2"'),
    "too new": (["lib-rary<1.5,>=1"], "needs lib-rary>=1,<1.5, found 1.5", 'pip install "lib-rary>=1,<1.5"'),
    "an extra that is asked for": (
        ["lib-rary[fast]>=1"],
        "needs absent-fast>=3, not installed",
        'pip install "absent-fast>=3"',
    ),
    "an extra of an extra": (
        ["lib-rary[all]"],
        "needs absent-fast>=3, not installed",
        'pip install "absent-fast>=3"',
    ),
    "another local version": (
        ["local-build==2.13.0+cu130"],
        "needs local-build==2.13.0+cu130, found 2.13.0+cpu",
        'pip install "local-build==2.13.0+cu130"',
    ),
    "a local version is not later": (
        ["local-build>2.13.0"],
        "needs local-build>2.13.0, found 2.13.0+cpu",
        'pip install "local-build>2.13.0"',
    ),
    "a pre-release is not yet the release": (
        ["pre-release>=2"],
        "needs pre-release>=2, found 2.0rc1",
        'pip install "pre-release>=2"',
    ),
    "nor below it": (["pre-release<2"], "needs pre-release<2, found 2.0rc1", 'pip install "pre-release<2"'),
    "core": (["engines-core>=99"], r"needs engines-core>=99, found 0.1.0", 'pip install "engines-core>=99"'),
    "several": (
        ["absent[some]>=2", "lib-rary", "lib-rary>=2"],
        "needs absent[some]>=2, not installed, and lib-rary>=2, found 1.5",
        'pip install "absent[some]>=2" "lib-rary>=2"',
    ),
    "a folder": (
        ["absent @ file:///somewhere"],
        "needs absent @ file:///somewhere, not installed",
        'pip install "absent @ file:///somewhere"',
    ),
}

UNREADABLE = {
    "no operator": ("lib-rary >>1", "Expected semicolon (after name with no version specifier) or end"),
    "no version": ("lib-rary>=one", "Expected semicolon"),
    "no variable": ('lib-rary; colour == "red"', "Expected a marker variable or quoted string"),
    "no comparison": ('lib-rary; python_version ~= "one"', "Undefined"),
}


def asking(group: str, number: int, *requires: str) -> FakePlugin:
    return plugin(f"{group}{number}", requires=requires)


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    made = make_venv(tmp_path_factory.mktemp("requirements") / "venv")
    met = [asking("met", number, *requires) for number, requires in enumerate(MET.values())]
    unmet = [asking("unmet", number, *requires) for number, (requires, _, _) in enumerate(UNMET.values())]
    unreadable = [asking("unreadable", number, text) for number, (text, _) in enumerate(UNREADABLE.values())]
    modest = manifest("fake_modest", "shared", priority="10")
    eager = manifest("fake_eager", "shared", priority="20")
    owners = [plugin("modest", modest), plugin("eager", eager, requires=("lib-rary>=2",))]
    made.install([*LIBRARIES, *met, *unmet, *owners])
    made.unpack(unreadable)
    return made


@pytest.fixture(scope="module")
def rows(venv: Venv) -> dict[str, dict[str, Any]]:
    ended = venv.engines("list", "--json")
    assert ended.returncode == 0, ended.stderr
    return {row["plugin"]: row for row in json.loads(ended.stdout)}


@pytest.mark.parametrize("case", MET)
def test_met(rows: dict[str, dict[str, Any]], case: str) -> None:
    row = rows[f"met{list(MET).index(case)}"]
    assert (row["status"], row["reason"]) == ("available", None)


@pytest.mark.parametrize("case", UNMET)
def test_unmet(rows: dict[str, dict[str, Any]], case: str) -> None:
    row = rows[f"unmet{list(UNMET).index(case)}"]
    assert (row["status"], row["reason"], row["remedy"]) == ("unavailable", *UNMET[case][1:])


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_broken(rows: dict[str, dict[str, Any]], case: str) -> None:
    number = list(UNREADABLE).index(case)
    text, why = UNREADABLE[case]
    row = rows[f"unreadable{number}"]
    assert row["status"] == "broken"
    assert row["reason"].startswith(f'engines-unreadable{number} requires "{text}", which cannot be read: {why}')
    assert row["remedy"] == f"upgrade engines-unreadable{number}, or tell its author"


def test_an_owner_without_its_requirements_does_not_win(venv: Venv) -> None:
    said = venv.engines("why", "language_model", "shared").stdout
    assert "taken  shared on cpu, engines-modest 1.0: priority 10" in said
    left = 'shared on cpu, engines-eager 1.0: needs lib-rary>=2, found 1.5; pip install "lib-rary>=2"'
    assert left in said


def test_the_refusal_names_them(venv: Venv) -> None:
    ended = venv.engines("why", "language_model", "unmet2")
    assert ended.returncode == 2
    assert 'needs lib-rary>=1.6,<2, found 1.5; pip install "lib-rary>=1.6,<2"' in ended.stderr
    assert ended.stderr.rstrip().endswith('\npip install "lib-rary>=1.6,<2"')


def test_show_names_them(venv: Venv) -> None:
    assert "unavailable: needs lib-rary>=1.6,<2, found 1.5" in venv.engines("show", "unmet2").stdout


def test_doctor_names_them_and_what_is_broken(venv: Venv) -> None:
    ended = venv.engines("doctor")
    assert ended.returncode == 1, ended.stderr
    assert 'unmet2 on cpu: needs lib-rary>=1.6,<2, found 1.5; pip install "lib-rary>=1.6,<2"' in ended.stdout
    assert ended.stdout.count("broken  engines-unreadable") == len(UNREADABLE)
    assert ended.stdout.endswith(f"{len(UNREADABLE)} broken.\n")
    said = json.loads(venv.engines("doctor", "--json").stdout)
    assert {one["entry_point"] for one in said["broken"]} == {f"unreadable{i}" for i in range(len(UNREADABLE))}
    unmet = {f"unmet{number}": reason for number, (_, reason, _) in enumerate(UNMET.values())}
    unmet["shared"] = "needs lib-rary>=2, found 1.5"
    assert {one["backend"]: one["reason"] for one in said["unavailable"]} == unmet


def write_metadata(folder: Path, name: str, version: str, text: str | None = None) -> Path:
    """Metadata that no pip would install."""
    path = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    path.mkdir(parents=True)
    (path / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if text is None else text
    )
    return path


def status(venv: Venv, name: str, path: Path) -> str:
    ended = venv.engines("list", "--json", PYTHONPATH=str(path))
    (row,) = (row for row in json.loads(ended.stdout) if row["plugin"] == name)
    return f"{row['status']}: {row['reason']}"


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        (["1.7"], "available: None"),
        (["1.4"], "found 1.4"),
        (["today"], "found today"),
        ([""], "found no version"),
        (["1.7", "1.8"], "available: None"),
        (["1.4", "1.7"], "found 1.4 and 1.7"),
    ],
)
def test_the_first_on_the_path_counts(venv: Venv, tmp_path: Path, versions: list[str], found: str) -> None:
    """Nobody can say which of two in one folder lies there, so both must fit; an empty one was cut short."""
    for version in versions:
        write_metadata(tmp_path, "lib-rary", version, None if version else "")
    assert status(venv, "unmet2", tmp_path).removeprefix("unavailable: needs lib-rary>=1.6,<2, ") == found


def test_an_interrupted_installation_meets_nothing(venv: Venv, tmp_path: Path) -> None:
    write_metadata(tmp_path, "lib-rary", "1.7", "")
    assert status(venv, "met1", tmp_path) == "unavailable: needs lib-rary, found no version"


def test_refresh_looks_again(venv: Venv, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from engines.registry import registry
sys.path.insert(0, {str(tmp_path)!r})
one = next(one for one in registry.candidates() if one.plugin == "unmet0")
print(registry.availability(one).status)
folder = Path({str(tmp_path)!r}, "absent-1.0.dist-info")
folder.mkdir()
(folder / "METADATA").write_text("Name: absent\\nVersion: 1.0\\n")
registry.refresh()
print(registry.availability(one).status)
"""
    assert venv.run("-P", "-c", code).stdout.split() == ["unavailable", "available"]


def test_nothing_that_is_required_is_imported(venv: Venv, tmp_path: Path) -> None:
    """Only metadata is read: a library whose import fails is as good as any."""
    (tmp_path / "lib_rary.py").write_text("raise SystemExit('imported')\n")
    assert status(venv, "met0", tmp_path) == "available: None"
