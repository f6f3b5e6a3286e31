"""What the commands say about the engines of this repository. None of it needs torch or runs plugin code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fake_plugins import REPO

HEAVY = (
    "torch", "transformers", "numpy", "ray", "rich", "engines_fsdp", "engines_megatron", "megatron", "omegaconf",
    "pyarrow",
)  # fmt: skip
KEYS = {
    "backend", "model_types", "device", "priority", "distribution", "version", "status", "reason", "remedy",
    "summary", "capabilities", "manifest",
}  # fmt: skip


def engines(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    clean = {key: value for key, value in os.environ.items() if not key.startswith("ENGINES_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "engines", *words], capture_output=True, text=True, check=False, env=clean | env
    )


def answer(*words: str, **env: str) -> Any:
    ended = engines(*words, **env)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["backend"], row["device"]): row for row in answer("list", "--json")}


@pytest.mark.parametrize(
    "words",
    [
        "list",
        "list --json",
        "list --all --can export",
        "show fsdp2",
        "show fsdp2:cpu",
        "why language_model fsdp2",
        "why value_model fsdp3 --json",
        "why language_model",
        "show megatron",
        "doctor",
        "doctor --json",
        "schema manifest",
        "schema recipe",
        "schema engine:fsdp2",
        "schema engine:megatron",
        "--help",
        "train --help",
        "nonsense",
    ],
)
def test_imports_nothing_heavy(words: str) -> None:
    code = """
import json, sys
import engines
from engines.cli.main import main
main(sys.argv[2:])
print("\\n" + json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""
    command = [sys.executable, "-P", "-c", code, json.dumps(HEAVY), *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


class TestList:
    def test_one_object_per_backend_and_device(self, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
        assert {("fsdp2", "cpu"), ("fsdp2", "cuda"), ("fsdp2", "npu")} <= set(rows)
        assert all(set(row) >= KEYS for row in rows.values())
        cpu = rows["fsdp2", "cpu"]
        assert cpu["status"] == "available"
        assert (cpu["reason"], cpu["remedy"]) == (None, None)
        assert cpu["distribution"] == "engines-fsdp"
        assert "language_model" in cpu["model_types"]
        assert cpu["manifest"].endswith("engines_fsdp/engine.toml")

    def test_an_absent_device_is_unavailable(self) -> None:
        rows = answer("list", "--json", ASCEND_RT_VISIBLE_DEVICES="")
        (npu,) = (row for row in rows if (row["backend"], row["device"]) == ("fsdp2", "npu"))
        assert npu["status"] == "unavailable"
        assert npu["reason"] == "ASCEND_RT_VISIBLE_DEVICES='' hides it"
        assert npu["remedy"]

    def test_can(self) -> None:
        assert {row["backend"] for row in answer("list", "--json", "--can", "export")} >= {"fsdp2"}
        assert answer("list", "--json", "--can", "x-nobody.does_this") == []
        ended = engines("list", "--can", "exprot")
        assert ended.returncode == 2
        assert 'Did you mean "export"?' in ended.stderr

    def test_denied_are_shown_with_all(self) -> None:
        denied = engines("list", ENGINES_DENY="fsdp").stdout
        assert "fsdp2" not in denied
        assert "more are denied (ENGINES_DENY)" in denied
        assert "No engine is installed" not in denied
        assert "denied" in engines("list", "--all", ENGINES_DENY="fsdp").stdout
        assert all(
            row["reason"] == "denied"
            for row in answer("list", "--json", ENGINES_DENY="fsdp")
            if row["plugin"] == "fsdp"
        )

    def test_table_fits(self) -> None:
        lines = engines("list").stdout.splitlines()
        assert lines[0].split() == ["BACKEND", "DEVICE", "STATUS"]
        assert max(map(len, lines)) <= 80
        assert any("fsdp2" in line and "cpu" in line and "available" in line for line in lines)


class TestShow:
    def test_all_devices_or_one(self) -> None:
        assert engines("show", "fsdp2").stdout.count("fsdp2 on ") == 3
        one = engines("show", "fsdp2:cpu").stdout
        assert one.startswith("fsdp2 on cpu\n")
        assert "engines_fsdp.engine:FSDP2Engine" in one
        assert "hybrid_shard" in one

    @pytest.mark.parametrize(
        ("word", "message"),
        [("fsdp", 'Did you mean "fsdp2"?'), ("fsdp2:cdua", 'does not run on "cdua". Did you mean "cuda"?')],
    )
    def test_unknown(self, word: str, message: str) -> None:
        ended = engines("show", word)
        assert ended.returncode == 2
        assert message in ended.stderr


class TestWhy:
    def test_as_json(self) -> None:
        said = answer("why", "language_model", "fsdp2", "--device", "cpu", "--json")
        assert said["selected"]["distribution"] == "engines-fsdp"
        assert said["selected"]["device_reason"] == "named by the argument"
        assert said["error"] is None
        assert [one["device"] for one in said["candidates"] if one["taken"]] == ["cpu"]
        assert len(said["candidates"]) == 3

    @pytest.mark.parametrize(
        ("model_type", "env", "backend"),
        [
            ("language_model", {}, "fsdp2"),
            ("value_model", {}, "megatron"),
            ("language_model", {"ENGINES_DENY": "fsdp"}, "megatron"),
        ],
    )
    def test_without_a_backend_priority_decides(self, model_type: str, env: dict[str, str], backend: str) -> None:
        """`docs/decisions/fsdp2-is-the-default.md`; a later device would change what is there to choose from."""
        said = answer("why", model_type, "--device", "cpu", "--json", **env)
        assert said["selected"]["backend"] == backend
        assert {one["backend"] for one in said["candidates"]} >= {"fsdp2", "megatron"}

    def test_why_the_default_is_taken(self) -> None:
        said = engines("why", "language_model", "--device", "cpu").stdout
        assert "taken  fsdp2 on cpu, engines-fsdp 0.1.0: priority 100, the highest of 2 available\n" in said
        assert "left   megatron on cpu, engines-megatron 0.1.0: available, priority 90\n" in said

    def test_refused_as_json(self) -> None:
        ended = engines("why", "language_model", "fsdp3", "--json")
        assert ended.returncode == 2
        said = json.loads(ended.stdout)
        assert said["selected"] is None
        assert 'Did you mean "fsdp2"?' in said["error"]

    def test_refused(self) -> None:
        ended = engines("why", "reward_model", "fsdp2")
        assert ended.returncode == 2
        assert "makes language_model" in ended.stderr
        assert "Traceback" not in ended.stderr


class TestRequirements:
    """What engines-megatron says where another release of megatron-core comes first on the path, or none does."""

    REASON = "needs megatron-core>=0.16.1,<0.16.2, found 0.17.0"
    REMEDY = 'pip install "megatron-core>=0.16.1,<0.16.2"'

    @pytest.fixture
    def newer(self, tmp_path: Path) -> str:
        folder = tmp_path / "megatron_core-0.17.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.17.0\n")
        return str(tmp_path)

    def test_list(self, newer: str) -> None:
        rows = {(row["backend"], row["device"]): row for row in answer("list", "--json", PYTHONPATH=newer)}
        row = rows["megatron", "cpu"]
        assert (row["status"], row["reason"], row["remedy"]) == ("unavailable", self.REASON, self.REMEDY)
        assert rows["fsdp2", "cpu"]["status"] == "available"

    def test_why(self, newer: str) -> None:
        ended = engines("why", "language_model", "megatron", "--device", "cpu", PYTHONPATH=newer)
        assert ended.returncode == 2
        assert f"left   megatron on cpu, engines-megatron 0.1.0: {self.REASON}; {self.REMEDY}" in ended.stderr

    def test_doctor(self, newer: str) -> None:
        ended = engines("doctor", PYTHONPATH=newer)
        assert ended.returncode == 0, "an engine that lacks something is not broken"
        assert f"megatron on cpu: {self.REASON}; {self.REMEDY}" in ended.stdout

    def test_train(self, newer: str) -> None:
        recipe = str(REPO / "examples/sft_smollm2.yaml")
        ended = engines("train", recipe, "engine.strategy=megatron", "engine.device=cpu", PYTHONPATH=newer)
        assert ended.returncode == 2
        assert f"{self.REASON}; {self.REMEDY}" in ended.stderr


class TestSchema:
    def test_manifest(self) -> None:
        import tomllib

        said = answer("schema", "manifest")
        manifest = tomllib.loads((REPO / "plugins/fsdp/src/engines_fsdp/engine.toml").read_text())
        assert set(manifest) <= set(said["properties"])
        assert set(manifest["engine"][0]) <= set(said["$defs"]["EngineEntry"]["properties"])

    def test_recipe(self) -> None:
        assert {"model", "engine", "optimizer", "data", "trainer", "launch"} <= set(
            answer("schema", "recipe")["properties"]
        )

    def test_settings_of_an_engine(self) -> None:
        assert "strategy" in answer("schema", "engine:fsdp2")["properties"]

    @pytest.mark.parametrize("name", ["manifets", "engine:", "engine:fsdp3"])
    def test_unknown(self, name: str) -> None:
        ended = engines("schema", name)
        assert ended.returncode == 2
        assert ended.stderr.startswith("Error: ")
