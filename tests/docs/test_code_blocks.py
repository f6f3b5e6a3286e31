"""What the pages show as code is run, block after block of a page; commands are checked against the CLI.

A block that can't be run stands below `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml

from documenting import ROOT, regions
from documenting.capabilities import settings_classes
from documenting.commands import every_command
from engines.config import EngineConfig
from engines.recipes.sft.config import SFTRecipe

PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md")))
}
GENERATED = re.compile(rf"{regions.MARK}.*?{regions.END}", re.DOTALL)
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUNNER = ROOT / "tests/docs/run_pages.py"

BEFORE = {
    "docs/contract.md": """
from engines import TrainingWorker
worker = TrainingWorker({"path": "model"}, {"strategy": "fsdp2"})
engine = worker.engine
""",
    "docs/megatron.md": """
import torch
from engines import Batch, TrainingWorker
batch = Batch.from_sequences([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}])
returns = torch.ones(3)
""",
}
"""What the prose of a page takes for granted."""


def blocks(text: str, *languages: str) -> list[str]:
    """Code that was written by hand and isn't excused."""
    found = BLOCK.findall(GENERATED.sub("", text))
    return [code for excused, language, _, code in found if language in languages and not excused]


WITH_PYTHON = {page: code for page, text in PAGES.items() if (code := blocks(text, "python"))}


@pytest.fixture(scope="module")
def tracebacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What went wrong in each page, all of them run by one process in one folder."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {page: {"before": BEFORE.get(page, ""), "blocks": code} for page, code in WITH_PYTHON.items()}
    asked, answer = folder / "pages.json", folder / "answer.json"
    asked.write_text(json.dumps(pages))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, str(RUNNER), str(asked), str(answer)]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_of_a_page_runs(page: str, tracebacks: dict[str, str | None]) -> None:
    assert tracebacks[page] is None, tracebacks[page]


KNOWN = {ctx.command_path: ctx for ctx in every_command()}


def commands(text: str) -> list[list[str]]:
    """Words of every command of ours in a block without a language, and in backticks."""
    lines = [line for code in blocks(text, "", "console") for line in code.splitlines()]
    lines += re.findall(r"`(engines [a-z]+(?: [^`]+)?)`", text)
    found = (re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*engines ([^#]*)", line) for line in lines)
    return [shlex.split(line[1]) for line in found if line]


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if commands(text)])
def test_the_cli_takes_the_commands_that_a_page_shows(page: str) -> None:
    for name, *words in commands(PAGES[page]):
        path = f"engines {name}"
        assert path in KNOWN, path
        if words and f"{path} {words[0]}" in KNOWN:
            path = f"{path} {words.pop(0)}"
        if words and "--help" not in words:
            KNOWN[path].command.make_context(path, words, parent=KNOWN[path].parent)


RECIPES = [
    pytest.param(shown, id=f"{page}: {', '.join(shown)}")
    for page in PAGES
    for block in blocks(PAGES[page], "yaml")
    for shown in yaml.safe_load_all(block)
    if "apiVersion" not in shown  # a cluster's, not ours
]


@pytest.mark.parametrize("shown", RECIPES)
def test_a_recipe_that_a_page_shows_is_valid(shown: dict[str, Any]) -> None:
    """A part of one is laid over the README's."""
    whole = {**yaml.safe_load(blocks(PAGES["README.md"], "yaml")[0]), **shown}
    engine = whole.pop("engine")
    meant = engine["strategy"], engine.get("device", "cpu")
    classes = {
        (backend, device): settings
        for settings, owners in settings_classes().items()
        for owner in owners
        for backend in owner.entry.backend
        for device in owner.entry.device
    }
    assert SFTRecipe.model_validate(whole)
    assert classes.get(meant, EngineConfig).model_validate(engine).strategy == engine["strategy"]
