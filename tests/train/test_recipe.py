"""Recipes: their keys and defaults, how layers lie over each other, what help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engines.cli.train import train
from engines.errors import CapabilityError, ConfigError
from engines.launch.threads import describe_threads
from engines.recipes.layering import read_layers, split_arguments
from engines.recipes.reference import key_table
from engines.recipes.sft.checks import total_steps
from engines.recipes.sft.config import SFTRecipe, TrainerConfig
from engines.recipes.sft.loading import build_recipe
from support.bigram import registered

SMALL: dict[str, Any] = {
    "recipe": "sft",
    "model": {"path": "model"},
    "data": {"train": "data.jsonl"},
    "trainer": {"steps": 3, "mini_batch_size": 2, "output_dir": "out"},
}


def test_defaults_are_those_that_people_were_promised() -> None:
    recipe, _ = build_recipe(SMALL)
    resolved = recipe.model_dump(mode="json")
    assert resolved["optimizer"] == {
        "lr": 1e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "schedule": "constant",
        "warmup_steps": 0,
    }
    expected = {"shuffle": True, "seed": 0, "save_every": None, "keep": None, "save_on_exit": True, "resume": "auto"}
    expected |= {"eval_every": None, "export": True, "max_skipped": 10, "loggers": []}
    assert expected.items() <= resolved["trainer"].items()
    assert resolved["launch"] == {"nproc": 1, "timeout_s": 600}
    assert resolved["data"]["overlong"] == "error"


def test_a_resolved_recipe_names_its_engine_and_means_the_same() -> None:
    recipe, selection = build_recipe({**SMALL, "engine": {"micro_batch_size": 2}})
    assert (recipe.engine.strategy, recipe.engine.device) == (selection.backend, selection.device)
    again, _ = build_recipe(recipe.model_dump(mode="json"))
    assert again == recipe
    assert type(again.engine).__module__ == "engines_fsdp.config", "validated by the plugin's own class"


def test_layers_lie_over_each_other_from_left_to_right(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: {a: 1, b: 1, c: 1e-3}\nname: run\n")
    (tmp_path / "b.yaml").write_text("x: {b: 2}\nout: outputs/${name}\n")
    files, overrides = split_arguments([str(tmp_path / "a.yaml"), "x.a=3", str(tmp_path / "b.yaml"), "x.d=[1, two]"])
    assert files == [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    merged = read_layers(files, overrides)
    assert merged == {"x": {"a": 3, "b": 2, "c": 1e-3, "d": [1, "two"]}, "name": "run", "out": "outputs/run"}
    assert read_layers(files, ["x.a=null"])["x"]["a"] is None
    assert read_layers(files, ["name=a=b"])["out"] == "outputs/a=b"


@pytest.mark.parametrize(("epochs", "samples", "batch", "expected"), [(1, 10, 5, 2), (1, 10, 4, 3), (3, 7, 2, 11)])
def test_epochs_cover_every_sample(epochs: int, samples: int, batch: int, expected: int) -> None:
    trainer = TrainerConfig(epochs=epochs, mini_batch_size=batch, output_dir="out")
    assert total_steps(trainer, samples) == expected


def test_help_shows_every_key_with_its_meaning() -> None:
    shown = CliRunner().invoke(train, ["--help"], terminal_width=100).output
    rows = [row for rows in key_table().values() for row in rows]
    for section in SFTRecipe.model_fields:
        assert any(key.startswith(section) for key, _ in rows)
    for key, meaning in rows:
        assert meaning, f"{key} says nothing"
        assert key in shown
    assert "trainer.save_every: int | null = null" in shown


def test_a_setting_of_another_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.no_such_key: unknown key"):
        build_recipe({**SMALL, "engine": {"no_such_key": 1}})


def test_what_an_engine_cannot_do_in_the_end_is_refused_at_the_beginning() -> None:
    asked = {**SMALL, "engine": {"strategy": "bigram"}, "trainer": {**SMALL["trainer"], "deterministic": True}}
    with registered(capabilities=[]), pytest.raises(CapabilityError) as error:
        build_recipe(asked)
    first, second = str(error.value).splitlines()
    assert first.startswith("trainer.export: True needs the capability export, which bigram lacks (engines that")
    assert second.startswith("trainer.deterministic: True needs the capability deterministic")
    with registered(capabilities=[]):
        build_recipe({**asked, "trainer": {**SMALL["trainer"], "export": False}})


def test_threads_are_shared_fairly_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.launch.threads.available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert describe_threads(2) == "2 processes on 8 cores, 4 threads each (OMP_NUM_THREADS is not set)"
    assert "16 processes on 8 cores (more processes than cores: slow), 1 thread each" in describe_threads(16)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert describe_threads(1) == "1 process on 8 cores, 3 threads each (OMP_NUM_THREADS is set)"
