"""Every way in which an installed plugin can be broken, all installed at once beside one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.broken_plugins import CASES, LOADED
from support.fake_plugins import Venv, make_venv, plugin


@pytest.fixture(scope="module")
def broken_venv(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    made = make_venv(tmp_path_factory.mktemp("broken") / "venv")
    made.install([plugin("good"), *(case.plugin for case in CASES.values())])
    for case in CASES.values():
        if case.damage is not None:
            case.damage(made.site)
    return made


@pytest.fixture(scope="module")
def diagnosis(broken_venv: Venv) -> dict[str, Any]:
    ended = broken_venv.engines("doctor", "--json")
    assert ended.returncode == 1, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@pytest.mark.parametrize("name", CASES)
def test_doctor_names_owner_file_cause_and_remedy(name: str, diagnosis: dict[str, Any]) -> None:
    case = CASES[name]
    found = [
        one
        for one in diagnosis["broken"]
        if one["distribution"] == case.plugin.distribution
        and one["entry_point"] == (case.entry_point or case.plugin.entry_point)
    ]
    assert len(found) == 1, found
    assert case.cause in found[0]["cause"]
    assert case.remedy in found[0]["remedy"]
    assert found[0]["file"].endswith(case.file)
    assert Path(found[0]["file"]).exists() or "the manifest is missing" in found[0]["cause"]


def test_doctor_finds_nothing_else(diagnosis: dict[str, Any]) -> None:
    assert len(diagnosis["broken"]) == len(CASES)
    assert diagnosis["ok"] is False
    assert {"good", "edited"} <= set(diagnosis["plugins"])


def test_doctor_says_each_in_one_line(broken_venv: Venv, diagnosis: dict[str, Any]) -> None:
    lines = [line for line in broken_venv.engines("doctor").stdout.splitlines() if line.startswith("broken")]
    assert len(lines) == len(CASES)
    for one in diagnosis["broken"]:
        words = (one["distribution"], f'"{one["entry_point"]}"', one["file"], one["cause"], one["remedy"])
        assert sum(all(word in line for word in words) for line in lines) == 1


def test_list_shows_them_and_disturbs_nothing(broken_venv: Venv) -> None:
    ended = broken_venv.engines("list", "--json")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    usable = {row["backend"] for row in rows if row["status"] == "available"}
    assert usable == {"good", "edited"}
    broken = [row for row in rows if row["status"] == "broken"]
    assert {row["distribution"] for row in broken} == {case.plugin.distribution for case in CASES.values()}
    assert all(row["reason"] and row["remedy"] and row["manifest"] for row in broken)


def test_table_of_broken_plugins_fits(broken_venv: Venv) -> None:
    ended = broken_venv.engines("list")
    assert ended.returncode == 0
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_the_good_one_still_loads(broken_venv: Venv) -> None:
    ended = broken_venv.code("""
        from engines.loading import load
        from engines.registry import registry
        print(load(registry.resolve("language_model", "good")).engine_class.__module__)
    """)
    assert ended.stdout == "fake_good.engine\n", ended.stderr


def test_lookup_error_tells_of_the_broken_one(broken_venv: Venv) -> None:
    ended = broken_venv.engines("why", "language_model", "typed")
    assert ended.returncode == 2
    assert "engines-typed 1.0: broken, `engine[0].priority` is 'high'" in ended.stderr


def test_a_tie_is_settled_by_its_owners_name(broken_venv: Venv) -> None:
    undecided = broken_venv.engines("why", "language_model", "contested")
    assert undecided.returncode == 2
    assert "contested@engines-left or contested@engines-right" in undecided.stderr
    named = broken_venv.engines("why", "language_model", "contested@engines-right")
    assert named.returncode == 0, named.stderr
    assert named.stdout.startswith("language_model contested: engines-right 1.0 on cpu")


def test_denied_plugins_are_not_broken(broken_venv: Venv) -> None:
    ended = broken_venv.engines("doctor", "--json", ENGINES_DENY="typed,right")
    owners = {one["distribution"] for one in json.loads(ended.stdout)["broken"]}
    assert not owners & {"engines-typed", "engines-left", "engines-right"}
    assert len(owners) > 1
    chosen = broken_venv.engines("why", "language_model", "contested", ENGINES_DENY="right")
    assert "contested on cpu, engines-right 1.0: denied" in chosen.stdout


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = make_venv(tmp_path_factory.mktemp("unloadable") / "venv")
    made.install([plugin("good"), *(case.plugin for case in LOADED.values())])
    assert made.engines("doctor").returncode == 0, "nothing is to be seen without running code"
    ended = made.engines("doctor", "--load", "--json")
    assert ended.returncode == 1, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@pytest.mark.parametrize("name", LOADED)
def test_doctor_load_names_the_cause(name: str, loading: dict[str, Any]) -> None:
    case = LOADED[name]
    (one,) = (one for one in loading["broken"] if one["entry_point"] == case.plugin.entry_point)
    assert one["distribution"] == case.plugin.distribution
    assert case.cause in one["cause"]
    assert case.remedy in one["remedy"]
    assert one["file"].endswith(case.file)


def test_doctor_load_loads_the_good_one(loading: dict[str, Any]) -> None:
    assert [one["backend"] for one in loading["loaded"]] == ["good"]
    assert len(loading["broken"]) == len(LOADED)
