"""Wheels of core and of every plugin hold what they must, and work in an empty venv outside the repo."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from engines.testing.tiny import tiny_folder
from support.commands import Command, recipe, write_jsonl
from support.fake_plugins import Venv
from support.wheels import PROJECTS, wheel_metadata

NAMES = [project.name for project in PROJECTS]
PLUGINS = [name for name in NAMES if name != "core"]


def engines(venv: Venv, *words: str) -> str:
    """Standard output of the installed command `engines`, which must succeed."""
    done = venv.run(str(venv.folder / "bin" / "engines"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names_in(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("name", NAMES)
def test_wheel_says_that_it_is_typed_and_licensed(wheels: dict[str, Path], name: str) -> None:
    package = "engines" if name == "core" else f"engines_{name}"
    held = names_in(wheels[name])
    assert f"{package}/py.typed" in held
    assert [file for file in held if file.endswith(".dist-info/licenses/LICENSE")]
    described = wheel_metadata(wheels[name]).metadata
    assert described["Description-Content-Type"] == "text/markdown", "its README"
    assert described.get_payload()
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.11"
    assert described["Summary"]


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_its_package_and_nothing_else(wheels: dict[str, Path], name: str) -> None:
    package = "engines" if name == "core" else f"engines_{name}"
    tops = {file.partition("/")[0] for file in names_in(wheels[name])}
    assert {top for top in tops if not top.endswith(".dist-info")} == {package}


@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_wheel_holds_its_manifest(wheels: dict[str, Path], name: str) -> None:
    assert f"engines_{name}/engine.toml" in names_in(wheels[name])


def test_core_alone_answers_without_torch(core_alone: Venv) -> None:
    assert core_alone.code("import torch").returncode != 0, "the venv should have no torch"
    assert json.loads(engines(core_alone, "list", "--json")) == []
    assert "no engine" in engines(core_alone, "list").lower()
    assert json.loads(engines(core_alone, "schema", "manifest"))["type"] == "object"
    assert json.loads(engines(core_alone, "schema", "recipe"))["type"] == "object"
    assert engines(core_alone, "doctor")


def test_core_alone_says_that_no_engine_is_installed(core_alone: Venv) -> None:
    done = core_alone.engines("why", "language_model", "fsdp2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "fsdp2" in done.stderr
    assert "Traceback" not in done.stderr


def test_core_alone_says_what_training_needs(core_alone: Venv, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: sft\n")
    done = core_alone.engines("train", str(recipe))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "engines-core[train]" in done.stderr
    assert "Traceback" not in done.stderr


def test_plugins_are_found_and_healthy(installed: Venv) -> None:
    rows = json.loads(engines(installed, "list", "--json"))
    on_cpu = {row["backend"]: row for row in rows if row["device"] == "cpu"}
    owners = {backend: row["distribution"] for backend, row in on_cpu.items()}
    assert owners == {"fsdp2": "engines-fsdp", "megatron": "engines-megatron"}
    for row in on_cpu.values():
        assert (row["status"], row["reason"]) == ("available", None)
        assert Path(row["manifest"]).is_relative_to(installed.folder), "found in the repo, not in the venv"
    assert not [row for row in rows if row["status"] == "broken"]
    engines(installed, "doctor")


@pytest.mark.more
def test_installed_wheels_train(installed: Venv, tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama").rename(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": list(range(2, length))} for length in (5, 9, 30, 7)])
    asked = recipe(tmp_path, launch={"nproc": 2}, trainer={"steps": 2})
    code, output = Command(asked, launcher=[str(installed.folder / "bin/engines")], cwd=tmp_path).finish()
    assert code == 0, output
    assert (tmp_path / "out/export/model.safetensors").is_file()


@pytest.mark.more
def test_engines_load_with_what_their_wheels_require(installed: Venv) -> None:
    engines(installed, "doctor", "--load")
