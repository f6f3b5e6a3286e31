"""`engines new`: what it makes is listed and passes the kit as it is, and is clean to the tools of its author."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines.cli.main import main
from engines.manifest import parse_manifest
from engines.scaffold import Names, render
from engines.testing.reference import REFERENCE
from support.wheels import REPO, build_wheel, install_wheels

ON_CPU, ON_CHIP = Names("plain"), Names("my-chip", "chip")
GUIDE = (REPO / "docs/writing-an-engine.md").read_text()
EACH = pytest.mark.parametrize("names", [ON_CPU, ON_CHIP], ids=lambda names: names.backend)


def make(folder: Path, names: Names, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The distribution's folder, made as a user makes it."""
    monkeypatch.chdir(folder)
    device = ["--device", names.device] if names.has_own_device else []
    assert main(["new", names.backend, *device]) == 0
    return folder / names.distribution


def run(folder: Path, *words: str, **more: str) -> str:
    """What a command that must succeed says."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ENGINES_", "PYTHON"))}
    done = subprocess.run(words, cwd=folder, env=env | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@EACH
def test_what_it_makes_is_clean(names: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    folder = make(tmp_path, names, monkeypatch)
    said = capsys.readouterr().out
    assert f"cd {names.distribution}\n" in said
    assert ("ENGINES_DEVICE=chip engines list" in said) == names.has_own_device
    files = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert files == render(names)
    assert not [file for file, text in files.items() if file.endswith(".py") and "reference" in text.lower()]
    run(folder, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(folder, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


@EACH
def test_its_manifest_says_what_the_reference_does(names: Names) -> None:
    manifest = parse_manifest(render(names)[f"src/{names.package}/engine.toml"].encode())
    (entry,) = manifest.engine
    assert entry.backend == (names.backend,)
    assert entry.device == (names.device,)
    assert (set(entry.capabilities), entry.model_type) == (set(REFERENCE["capabilities"]), REFERENCE["model_type"])
    assert 0 < entry.priority < 90, "a recipe without a strategy must still mean fsdp2 or megatron"
    assert [(one.name, one.spec().torch_device) for one in manifest.device] == (
        [("chip", "cpu")] if names.has_own_device else []
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["reference"], "taken by engines-core"),
        (["core"], "taken by engines-core"),
        (["fsdp2"], "taken by engines-fsdp"),
        (["mindspeed"], "taken by engines-mindspeed"),
        (["My.Chip"], "can't name a backend"),
        (["3d"], "can't name a backend"),
        (["mine", "--device", "cuda"], "described already"),
        (["mine", "--device", "a b"], "can't name a device"),
        (["there"], "exists already"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_and_nothing_made(
    words: list[str], says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "engines-there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["engines-there"]


def test_a_name_is_one_word_for_pip_and_another_for_python() -> None:
    assert (ON_CHIP.distribution, ON_CHIP.package, ON_CHIP.stem) == ("engines-my-chip", "engines_my_chip", "MyChip")


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_it_passes_the_kit_in_an_empty_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plugins, built, installed beside core alone, listed, typed, and held to the contract by their own tests;
    and what the guide gives an author to train."""
    plain, chip = (make(tmp_path, names, monkeypatch) for names in (ON_CPU, ON_CHIP))
    wheels = [build_wheel(project, tmp_path) for project in (REPO / "core", plain, chip)]
    venv = install_wheels(tmp_path / "venv", wheels, extras=["dev"])
    rows = json.loads(venv.engines("list", "--json", ENGINES_DEVICE="chip").stdout)
    assert [(row["backend"], row["device"], row["status"]) for row in rows] == [
        ("my-chip", "chip", "available"),
        ("plain", "cpu", "available"),
    ]
    python = str(venv.python)
    run(chip, python, "-m", "mypy")
    headings = {chip: "my-chip on chip (engines-my-chip 0.1.0)", plain: "plain on cpu (engines-plain 0.1.0)"}
    with ThreadPoolExecutor() as both:
        outputs = both.map(
            lambda folder: run(folder, python, "-m", "pytest", "-q", "-p", "no:cacheprovider"), headings
        )
    for said, heading in zip(outputs, headings.values(), strict=True):
        assert heading in said
        for capability in REFERENCE["capabilities"]:
            assert re.search(rf"^{capability} +proven by", said, re.MULTILINE), said
    for name in ("tiny.py", "recipe.yaml"):
        shown = re.search(rf'title="{name}"\n(.*?)```', GUIDE, re.DOTALL)
        assert shown
        (chip / name).write_text(shown[1].replace("strategy: mychip", "strategy: my-chip"))
    run(chip, python, "tiny.py")
    run(chip, python, "-m", "engines", "train", "recipe.yaml", ENGINES_DEVICE="chip")
    losses = [json.loads(line)["loss"] for line in (chip / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]
