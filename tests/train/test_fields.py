"""No key of data, trainer and launch is accepted and ignored: each, set to a second value, makes a difference.

A field without a row here fails the test. Those of model, engine and optimizer: `contract/test_config_fields.py`.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoint.background import HostCopies
from engines.checkpoint_folder import read_manifest
from engines.determinism import DETERMINISTIC_ENV
from engines.errors import CheckpointError, EnginesError
from engines.launch import Job, Rank, RunFailed
from engines.launch.job import run_target
from engines.launch.stopping import StopRequest
from engines.recipes.output.folder import OutputFolder
from engines.recipes.sft.checkpoints import Checkpoints
from engines.recipes.sft.config import DataConfig, LaunchConfig, TrainerConfig
from engines.recipes.sft.train import train
from support.commands import read_jsonl, recipe, write_jsonl

STOPPED, AGAIN, NO_ROOM = "stopped", "again", "no room"
"""Beside a row's value: the run is asked to stop after its second step; the run before the one that is looked at;
there is no room for what is saved after the second step."""
LARGEST_FILE = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
DIVERGES = {"optimizer.lr": 1e30, "optimizer.clip_grad": None}


@dataclass(frozen=True)
class Row:
    """A second value of a key, and what it must change: a key of what `observe` returns."""

    value: Any
    differs: str
    beside: dict[str, Any] = field(default_factory=dict)
    """Other settings of both runs."""


DATA_ROWS = {
    "train": Row("other.jsonl", "losses"),
    "eval": Row("other.jsonl", "evaluated"),
    "max_length": Row(10, "error"),
    "overlong": Row("truncate", "error", {"data.max_length": 10}),
}
TRAINER_ROWS = {
    "mini_batch_size": Row(2, "losses"),
    "output_dir": Row("elsewhere", "folders"),
    "steps": Row(3, "losses"),
    "epochs": Row(1, "losses", {"trainer.steps": None}),
    "shuffle": Row(False, "losses"),
    "seed": Row(1, "losses"),
    "deterministic": Row(True, "deterministic"),
    "save_every": Row(2, "checkpoints"),
    "keep": Row(1, "checkpoints", {"trainer.save_every": 2}),
    "async_save": Row(True, "copied"),
    "on_save_error": Row("continue", "error", {"trainer.save_every": 2, NO_ROOM: True}),
    "checkpoint_contents": Row(["model", "huggingface"], "held"),
    "save_on_exit": Row(False, "checkpoints", {STOPPED: True}),
    "resume": Row("never", "error", {AGAIN: True}),
    "eval_every": Row(1, "evaluated", {"data.eval": "other.jsonl"}),
    "export": Row(False, "files"),
    "max_skipped": Row(1, "error", DIVERGES),
    "loggers": Row(["tensorboard"], "files"),
    "trace": Row(True, "files"),
}
LAUNCH_ROWS = {"nproc": Row(2, "started"), "timeout_s": Row(60, "started")}
SECTIONS = {"data": DATA_ROWS, "trainer": TRAINER_ROWS, "launch": LAUNCH_ROWS}


def test_every_field_has_a_row() -> None:
    for rows, section in ((DATA_ROWS, DataConfig), (TRAINER_ROWS, TrainerConfig), (LAUNCH_ROWS, LaunchConfig)):
        assert rows.keys() == section.model_fields.keys()


class SecondThoughts(StopRequest):
    """A signal that comes during the second step."""

    looks = 0

    def agreed(self) -> int:
        self.looks += 1
        return signal.SIGTERM if self.looks > 2 else 0


class SmallFiles(StopRequest):
    """Files can't grow beyond 4 kB from the second step to the third."""

    looks = 0

    def agreed(self) -> int:
        self.looks += 1
        if self.looks in (2, 3):
            limit_files(4096 if self.looks == 2 else LARGEST_FILE)
        return 0


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def observe(work: Path, tmp_path_factory: Any, monkeypatch: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a run in this process, with these settings over small ones, leaves behind."""
    draw = random.Random(1)
    other = [{"input_ids": [draw.randrange(256) for _ in range(n)]} for n in (9, 8, 7, 6, 5)]
    write_jsonl(work / "other.jsonl", other)
    recipe(work, data={"train": "data.jsonl"}, trainer={"output_dir": "out"})
    started: list[Job] = []
    copied: list[object] = []
    take = HostCopies.take
    monkeypatch.setattr(HostCopies, "take", lambda self, files: copied.append(self) or take(self, files))

    def run_one(job: Job) -> int:
        started.append(job)
        return run_target(job, Rank(0, 1, stop)) if job.num_ranks == 1 else 0

    def run(settings: dict[str, Any]) -> dict[str, Any]:
        nonlocal stop
        settings = dict(settings)
        stop = SecondThoughts() if settings.pop(STOPPED, False) else StopRequest()
        stop = SmallFiles() if settings.pop(NO_ROOM, False) else stop
        again = settings.pop(AGAIN, False)
        folder = tmp_path_factory.mktemp("run")
        for name in ("data.jsonl", "other.jsonl"):
            (folder / name).write_bytes((work / name).read_bytes())
        monkeypatch.chdir(folder)
        started.clear()
        copied.clear()
        if again:
            train([work / "recipe.yaml"])
        error = None
        try:
            train([work / "recipe.yaml"], [f"{key}={json.dumps(value)}" for key, value in settings.items()])
        except (EnginesError, RunFailed) as raised:
            error = str(raised)
        finally:
            limit_files(LARGEST_FILE)
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
        lines = [line for each in folders for line in read_jsonl(each / "metrics.jsonl")]
        return {
            "error": error,
            "started": [(job.num_ranks, job.timeout_s) for job in started],
            "folders": [path.name for path in folders],
            "files": sorted(path.name for each in folders for path in each.iterdir()),
            "checkpoints": [step for each in folders for step in OutputFolder(each).steps()],
            "held": [read_manifest(path).held for each in folders for path in (each / "checkpoints").glob("step-*")],
            "copied": len(copied),
            "losses": [line["loss"] for line in lines],
            "evaluated": [line["step"] for line in lines if line.get("eval_loss") is not None],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    stop = StopRequest()
    monkeypatch.setattr("engines.launch.launch", run_one)
    return run


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Any:
    before = {name: os.environ.pop(name, None) for name in DETERMINISTIC_ENV}
    yield
    torch.use_deterministic_algorithms(False)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section, rows in SECTIONS.items() for name in rows]
)
def test_no_field_is_ignored(section: str, name: str, observe: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    row = SECTIONS[section][name]
    before = observe(row.beside)
    found = observe({**row.beside, f"{section}.{name}": row.value})
    assert found[row.differs] != before[row.differs]


def test_a_diagnosis_and_a_save_that_failed_are_both_said(observe: Any, monkeypatch: Any) -> None:
    """The save began before the last step, and fails while that is made."""

    def fails(self: Checkpoints) -> None:
        raise CheckpointError("cannot save step-1: no room", "Mend it.")

    monkeypatch.setattr(Checkpoints, "finish", fails)
    error = observe({**DIVERGES, "trainer.max_skipped": 1})["error"]
    assert error.startswith("the gradients of 1 steps in a row were not finite (trainer.max_skipped), the last one ")
    assert "; no checkpoint was saved.\nNo sample of that step has a finite loss" in error
    assert error.endswith("\nBesides, cannot save step-1: no room\nMend it.")


def test_an_export_without_room_leaves_nothing_but_checkpoints(observe: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Rank, "at", lambda self, place: limit_files(4096) if place == "exporting" else None)
    found = observe({})
    said = r"cannot export to out/export: \[Errno 27\] File too large: '.*/shard-0'; step 4 is the last one saved\n"
    assert re.fullmatch(said + "Mend it, and the same command goes on from there.", found["error"])
    assert found["files"] == [".lock", "checkpoints", "metrics.jsonl", "recipe.yaml", "run.json"]
    assert found["checkpoints"] == [4]


def test_equal_settings_make_no_difference(observe: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Or every row above would pass."""
    first = observe({})
    assert first == observe({}) and first["error"] is None and len(first["losses"]) == 4
