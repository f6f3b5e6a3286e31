"""What README and docs show is what the code does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from engines.engine.binding import HOOKS
from engines.manifest import Manifest
from engines.recipes.sft.loading import build_recipe
from engines_mindspeed.config import MindSpeedConfig
from engines_mindspeed.versions import PAIRS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("core/*.md"), *ROOT.glob("plugins/*/*.md")]
README = (ROOT / "README.md").read_text()
EVERYTHING = "\n".join(page.read_text() for page in PAGES)


def blocks(language: str, text: str = README) -> list[str]:
    """Fenced blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_readme_starts_with_the_two_commands() -> None:
    commands = re.findall(r"^make \S+", README[: README.index("\n## ")], re.MULTILINE)
    assert commands == ["make demo", "make test"]


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", EVERYTHING, re.MULTILINE))
    assert {one or other for one, other in named} <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("recipe", [ROOT / "README.md", *ROOT.glob("examples/*.yaml")], ids=lambda path: path.name)
def test_recipes_are_valid(recipe: Path) -> None:
    text = blocks("yaml")[0] if recipe.suffix == ".md" else recipe.read_text()
    built, selection = build_recipe(yaml.safe_load(text))
    assert built.engine.strategy == selection.backend
    assert (ROOT / built.data.train).is_file()
    assert built.data.eval is None or (ROOT / built.data.eval).is_file()


def test_keys_that_are_set_in_prose_exist() -> None:
    keys = set()
    for strategy in ("fsdp2", "megatron"):
        recipe, _ = build_recipe(yaml.safe_load(blocks("yaml")[0]) | {"engine": {"strategy": strategy}})
        parts = recipe.model_dump().items()
        keys |= {f"{name}.{key}" for name, part in parts if isinstance(part, dict) for key in part}
    keys |= {f"engine.{key}" for key in MindSpeedConfig.model_fields}  # of a device that is absent
    by_hand = re.sub(r"<!-- generated: .*?<!-- until here -->", "", EVERYTHING, flags=re.DOTALL)
    named = set(re.findall(r"\b([a-z]+\.[a-z_]+)[=:] ?[\w\[]", by_hand))
    assert named - {"package.module"} <= keys


def test_readme_shows_what_list_prints() -> None:
    def run(*options: str) -> str:
        command = [sys.executable, "-m", "engines", "list", *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=terminal).stdout

    terminal = {**os.environ, "COLUMNS": "80"}
    rows = json.loads(run("--json"))
    if any(row["device"] != "cpu" and row["status"] == "available" for row in rows):
        pytest.skip("the README shows a machine without accelerators")
    assert run() == README.partition("$ engines list\n")[2].partition("```")[0]


def test_readme_manifest_is_valid() -> None:
    entry_point, manifest = map(tomllib.loads, blocks("toml"))
    assert entry_point["project"]["entry-points"]["engines"] == {"mine": "engines_mine"}
    assert Manifest.model_validate(manifest).engine[0].backend


@pytest.mark.parametrize(("name", "at_least"), [("harbour_train", 200), ("harbour_eval", 16)])
def test_example_data_keep_their_form(name: str, at_least: int) -> None:
    lines = (ROOT / f"examples/data/{name}.jsonl").read_text().splitlines()
    questions = [json.loads(line)["messages"][0]["content"] for line in lines]
    assert len(set(questions)) == len(lines) >= at_least
    for line in lines:
        for question, answer in zip(*[iter(json.loads(line)["messages"])] * 2, strict=True):
            assert (question["role"], answer["role"]) == ("user", "assistant")
            assert re.fullmatch(r"Ahoy! .+\nLog: .+", answer["content"])


def test_evaluation_asks_what_training_did_not() -> None:
    train, evaluation = ((ROOT / f"examples/data/harbour_{part}.jsonl").read_text() for part in ("train", "eval"))
    asked = {json.loads(line)["messages"][0]["content"] for line in train.splitlines()}
    assert not asked & {json.loads(line)["messages"][0]["content"] for line in evaluation.splitlines()}


def test_the_contract_page_lists_every_hook() -> None:
    page = (ROOT / "docs/contract.md").read_text().partition("## The hooks")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[1])) == sorted(HOOKS)
    needed = {
        name: re.findall(r"capability `(\w+)`", row[2]) for row in rows for name in re.findall(r"`(\w+)`", row[1])
    }
    assert needed == {
        name: [hook.__engines_capability__] if hook.__engines_capability__ else [] for name, hook in HOOKS.items()
    }


def test_the_table_of_mindspeeds_versions() -> None:
    rows = re.findall(r"^\| (==\S+) \| (\S+) \| (\S+) \| (\S+) \|$", (ROOT / "docs/mindspeed.md").read_text(), re.M)
    assert [(mindspeed, branch, torch) for mindspeed, branch, _, torch in rows] == [
        (str(one.mindspeed), one.branch, one.torch) for one in PAIRS
    ]
    assert [SpecifierSet(core) for _, _, core, _ in rows] == [one.megatron_core for one in PAIRS]


def test_benchmarks_are_listed() -> None:
    listed = re.findall(r"^\| `(\w+\.py)`", (ROOT / "benchmarks/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("benchmarks/*.py"))
