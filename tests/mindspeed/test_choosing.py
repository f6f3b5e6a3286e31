"""One word, two distributions: whose engine `megatron` is on which device, and what to install."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engines.cli.main import engines
from engines.errors import EnginesError
from engines.registry import EngineFields, Registry
from support.mindspeed import fresh, make_site

WHY = """
from io import StringIO
from contextlib import redirect_stderr, redirect_stdout
from engines.cli.main import main

said = StringIO()
with redirect_stdout(said), redirect_stderr(said):
    code = main(["why", "language_model", "megatron", "--device", "npu"])
answer([code, said.getvalue()])
"""


def why(site: Path, code: str = WHY, **env: str) -> tuple[int, str]:
    code, said = fresh(site, code, **env)
    return int(code), said


def test_installed(tmp_path: Path) -> None:
    code, said = why(make_site(tmp_path / "site"))
    assert code == 0
    assert said.startswith("language_model megatron: engines-mindspeed 0.1.0 on npu\n")
    assert "taken  megatron on npu, engines-mindspeed 0.1.0: priority 95" in said
    assert "left   megatron on cpu, engines-megatron 0.1.0: npu was asked for" in said


def test_without_mindspeed(tmp_path: Path) -> None:
    code, said = why(make_site(tmp_path / "site", mindspeed=None))
    assert code == 2
    assert "left   megatron on npu, engines-mindspeed 0.1.0: needs mindspeed, not installed; follow" in said
    assert "MindSpeed's own installation guide for its branch core_r0.16.0" in said
    assert "pip install mindspeed" not in said


def test_denied(tmp_path: Path) -> None:
    code, said = why(make_site(tmp_path / "site"), ENGINES_DENY="mindspeed")
    assert code == 2
    assert "left   megatron on npu, engines-mindspeed 0.1.0: denied" in said
    assert "engines-mindspeed has it for npu: take mindspeed out of the deny list." in said
    assert "pip install" not in said


def test_another_owner_asked_for(tmp_path: Path) -> None:
    code, said = why(
        make_site(tmp_path / "site"), WHY.replace('"megatron", "--dev', '"megatron@engines-megatron", "--dev')
    )
    assert code == 2
    assert "engines-mindspeed has it for npu: write megatron@engines-mindspeed." in said


def test_without_the_distribution(tmp_path: Path) -> None:
    hidden = """
import importlib_metadata
discover = importlib_metadata.Distribution.discover
def others(**more):
    return (one for one in discover(**more) if one.metadata["Name"] != "engines-mindspeed")
importlib_metadata.Distribution.discover = others
"""
    code, said = why(make_site(tmp_path / "site"), hidden + WHY)
    assert code == 2
    assert "it runs on cpu, cuda" in said
    assert "pip install engines-mindspeed" in said


def test_doctor_says_what_is_missing(tmp_path: Path) -> None:
    code = WHY.replace('["why", "language_model", "megatron", "--device", "npu"]', '["doctor"]')
    done, said = why(make_site(tmp_path / "site", mindspeed=None), code)
    assert done == 0, "what is missing is not broken"
    assert "megatron on npu: needs mindspeed, not installed; follow MindSpeed's own installation guide" in said


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        ((), "megatron on cpu, cuda (engines-megatron 0.1.0); --device npu shows those of engines-mindspeed"),
        (
            ("--device", "npu"),
            "megatron on npu (engines-mindspeed 0.1.0); --device cpu or cuda shows those of engines-megatron",
        ),
    ],
)
def test_settings_are_those_of_the_engine_on_that_device(words: tuple[str, ...], whose: str) -> None:
    result = CliRunner().invoke(engines, ["schema", "engine:megatron", *words], env={"ENGINES_DEVICE": None})
    said = json.loads(result.output)
    assert next(iter(said.items())) == ("$comment", whose)
    assert ("flash_attention" in said["properties"]) == ("npu" in words)
    assert "tensor_parallel_size" in said["properties"]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            ["engine:megatron", "--device", "cdua"],
            'does not run on "cdua" (the argument). Did you mean "cuda"?',
        ),
        (["recipe", "--device", "npu"], "--device npu: only an engine's settings depend on a device"),
    ],
)
def test_settings_on_no_such_device(words: list[str], refusal: str) -> None:
    error = CliRunner().invoke(engines, ["schema", *words], standalone_mode=False).exception
    assert isinstance(error, EnginesError)
    assert refusal in str(error)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    """The installed engines on a machine with an NPU."""
    monkeypatch.syspath_prepend(str(make_site(tmp_path / "site")))
    monkeypatch.setenv("ENGINES_DEVICE", "npu")
    monkeypatch.setattr("engines.availability.imported_too_early", lambda *_: None)
    monkeypatch.setattr("engines.devices._ask_imported_torch", lambda _: None)
    return Registry()


def another(priority: int) -> EngineFields:
    fields: dict[str, Any] = {"backend": "megatron", "model_type": "language_model", "device": "npu"}
    return EngineFields(**fields, engine=object, config=object, id="another", priority=priority)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("priority", "owner"), [(90, "engines-mindspeed"), (96, "in-process")])
def test_its_priority_decides(npu: Registry, priority: int, owner: str) -> None:
    with npu.registered(**another(priority)):
        chosen = npu.resolve("language_model", "megatron")
    assert (chosen.distribution, chosen.device) == (owner, "npu")
    assert "the highest of 2 available" in chosen.explain()


def test_fsdp2_stays_the_default(npu: Registry) -> None:
    assert npu.resolve("language_model", None).backend == "fsdp2"


def test_both_model_types(npu: Registry) -> None:
    assert npu.resolve("value_model", "megatron").distribution == "engines-mindspeed"
