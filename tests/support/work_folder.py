"""What `engines train` needs to run: a tiny model and data."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from engines.testing.tiny import tiny_folder
from support.commands import write_jsonl


def fill(folder: Path, model: Path) -> Path:
    """Put `model` and `data.jsonl` into it: 13 samples of 2 to 40 tokens, random masks, one without target."""
    shutil.copytree(model, folder / "model")
    draw = random.Random(0)
    records = []
    for _ in range(13):
        ids = [draw.randrange(256) for _ in range(draw.randint(2, 40))]
        records.append({"input_ids": ids, "loss_mask": [int(draw.random() < 0.7) for _ in ids]})
    records[4]["loss_mask"] = [0] * len(records[4]["loss_mask"])
    write_jsonl(folder / "data.jsonl", records)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama without tokenizer, made once."""
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def work(tmp_path: Path, model: Path) -> Path:
    """A folder with `model` and `data.jsonl`; see `fill`."""
    return fill(tmp_path, model)
