"""The door through which an engine's settings refuse a model or a number of processes: `EngineConfig.check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import engines
from engines.cli.main import main
from engines.config import EngineConfig, ModelConfig
from engines.configuring import validate
from engines.contract import EngineContext
from engines.errors import ConfigError, EnginesError, LaunchError, ModelError
from engines.model_folder import read_config
from support.bigram import MODEL, BigramEngine, registered
from support.commands import recipe, snapshot, write_jsonl

SIZES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "context_parallel_size": 3}


class OddConfig(EngineConfig):
    """Runs no model with an even vocabulary, nor on two processes."""

    def check(self, model: ModelConfig, *, model_type: str, world_size: int) -> None:
        super().check(model, model_type=model_type, world_size=world_size)
        faults = []
        if world_size == 2:
            faults.append(f"{self.strategy}: no {model_type} on 2 processes. Use 3.")
        if read_config(model.path)["vocab_size"] % 2 == 0:
            faults.append("vocab_size is even. Use an odd model.")
        if faults:
            raise ConfigError("\n".join(faults))


class NeverMade(BigramEngine):
    """An engine that must not be constructed."""

    def __init__(self, ctx: EngineContext) -> None:
        raise AssertionError("constructed in spite of the refusal")


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """A folder with a config.json that `OddConfig` refuses, and with weights and data that everybody reads."""
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 16}))
    save_file({}, tmp_path / "model" / "model.safetensors")
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, 2, 3]}])
    return tmp_path


def create_odd(folder: Path) -> tuple[type, str]:
    with registered(NeverMade, config=OddConfig), pytest.raises(EnginesError) as error:
        engines.create({"path": str(folder)}, {"strategy": "bigram"})
    return error.type, str(error.value)


def test_create_asks_before_it_constructs(even: Path) -> None:
    kind, message = create_odd(even / "model")
    assert (kind, message) == (ConfigError, "vocab_size is even. Use an odd model.")


def test_create_asks_on_every_rank(even: Path, world: Any) -> None:
    for kind, message in world(2)(create_odd, even / "model"):
        assert kind is ConfigError
        assert message.splitlines()[0] == "bigram: no language_model on 2 processes. Use 3."


def test_a_recipe_asks_before_it_starts_a_process(even: Path, monkeypatch: Any, capsys: Any) -> None:
    def started(job: Any) -> int:
        raise AssertionError("started in spite of the refusal")

    monkeypatch.setattr("engines.launch.launch", started)
    file = recipe(even, engine={"strategy": "bigram"}, launch={"nproc": 2}, trainer={"export": False})
    before = snapshot(even)
    with registered(NeverMade, config=OddConfig):
        assert main(["train", str(file)]) == 2
    said = capsys.readouterr().err
    assert "bigram: no language_model on 2 processes" in said
    assert "vocab_size is even" in said
    assert snapshot(even) == before


def test_who_does_not_look_at_the_model_needs_no_folder() -> None:
    with registered():
        engines.create(MODEL, {"strategy": "bigram"}).close()
    assert not Path(MODEL["path"]).exists()


@pytest.mark.parametrize("world_size", [1, 6, 13, 24])
def test_replicas_divide_the_processes(world_size: int) -> None:
    config = EngineConfig(**SIZES)
    if world_size % 12 == 0:
        config.check(ModelConfig(**MODEL), model_type="language_model", world_size=world_size)
        return
    with pytest.raises(LaunchError) as error:
        config.check(ModelConfig(**MODEL), model_type="language_model", world_size=world_size)
    for word in (f"{world_size} process", "replicas of 12", "a multiple of 12", *SIZES):
        assert word in str(error.value)


def test_the_home_of_config_json(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match="holds no config"):
        read_config(tmp_path / "model")
    with pytest.raises(ModelError, match=r"there is no folder .*\n.* holds model\."):
        read_config(tmp_path / "modle")
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 3}')
    assert read_config(validate(ModelConfig, {"path": "~/model"}).path) == {"vocab_size": 3}
