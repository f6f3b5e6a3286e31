"""What an NPU's engines lack is said from metadata in the same words by each command, before anything is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.fake_plugins import REPO
from support.mindspeed import fresh, make_site

ASK = """
from io import StringIO
from contextlib import redirect_stderr, redirect_stdout
from engines.cli.main import main

said = {}
for words in WORDS:
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = main(words)
    said[words[0]] = [code, output.getvalue()]
answer([said, imported("torch", "torch_npu", "megatron", "mindspeed")])
"""
RECIPE = str(REPO / "examples/sft_smollm2.yaml")


def ask(site: Path, backend: str) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command."""
    words = [
        ["list", "--json"],
        ["why", "language_model", backend, "--device", "npu"],
        ["doctor"],
        ["train", RECIPE, f"engine.strategy={backend}", "engine.device=npu"],
    ]
    said, imported = fresh(site, f"WORDS = {words!r}\n{ASK}")
    assert imported == []
    return {command: (code, output) for command, (code, output) in said.items()}


def assert_all_say(said: dict[str, tuple[int, str]], backend: str, reason: str, remedy: str) -> None:
    (row,) = (row for row in json.loads(said["list"][1]) if (row["backend"], row["device"]) == (backend, "npu"))
    assert (row["status"], row["reason"], row["remedy"]) == ("unavailable", reason, remedy)
    assert {command: code for command, (code, _) in said.items()} == {"list": 0, "why": 2, "doctor": 0, "train": 2}
    for command in ("why", "doctor", "train"):
        assert f"{reason}; {remedy}" in said[command][1], command
        assert f"{backend} on npu" in said[command][1], command


INSTALL_TORCH_NPU = "install CANN and the torch_npu that fits torch, as Ascend's installation guide says"


@pytest.mark.parametrize("backend", ["fsdp2", pytest.param("megatron", marks=pytest.mark.more)])
def test_without_torch_npu(backend: str, tmp_path: Path) -> None:
    """Which no engine's manifest names: the device needs it, whoever runs there."""
    said = ask(make_site(tmp_path / "site", torch_npu=None), backend)
    assert_all_say(said, backend, "needs torch_npu, not installed", INSTALL_TORCH_NPU)


GUIDE = (
    "follow MindSpeed's own installation guide for its branch core_r0.16.0; "
    "the package index holds only a placeholder"
)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.12.1", "needs mindspeed==0.16.*, found 0.12.1"),
        pytest.param(
            "", "needs mindspeed==0.16.*, and no metadata says which version is here", marks=pytest.mark.more
        ),
    ],
)
def test_another_mindspeed(version: str, reason: str, tmp_path: Path) -> None:
    said = ask(make_site(tmp_path / "site", mindspeed=version, adaptor=None if version else ""), "megatron")
    assert_all_say(said, "megatron", reason, GUIDE)


@pytest.mark.more
def test_another_megatron_core(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site")
    newer = site / "megatron_core-0.17.0.dist-info"
    newer.mkdir()
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.17.0\n")
    said = ask(site, "megatron")
    reason, remedy = "needs megatron-core>=0.16.1,<0.17, found 0.17.0", 'pip install "megatron-core>=0.16.1,<0.17"'
    assert_all_say(said, "megatron", reason, remedy)


def test_the_manifest_repeats_the_table() -> None:
    from importlib.resources import files

    from engines.manifest import parse_manifest
    from engines_mindspeed.versions import PAIRS

    (entry,) = parse_manifest(files("engines_mindspeed").joinpath("engine.toml").read_bytes()).engine
    repeated = entry.versions["mindspeed"], entry.versions["megatron-core"]
    assert [(pair.mindspeed, pair.megatron_core) for pair in PAIRS] == [repeated]
