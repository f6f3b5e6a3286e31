"""A run that starts from a checkpoint's weights starts from what an export at that step would have held."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.checkpoint.convert import convert
from engines.errors import CheckpointError
from engines.losses import SFTLoss
from engines.testing.samples import mini_batches
from engines.weights import ModelFiles
from engines.worker import TrainingWorker
from support.fsdp2 import OPTIMIZER, fsdp2, share, train_step, weights
from support.tokenizer import tiny_tokenizer


@pytest.fixture(scope="module", params=["llama_tied", "qwen3_moe"])
def trained(
    request: pytest.FixtureRequest, world: Any, folder: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with `step-2`, saved by two ranks after two steps, and `export`, written then."""
    source = tmp_path_factory.mktemp("source") / request.param
    shutil.copytree(folder(request.param), source)
    tiny_tokenizer(source)
    target = tmp_path_factory.mktemp("trained")
    world(2)(train, source, target)
    return target


def train(source: Path, target: Path) -> None:
    with TrainingWorker({"path": str(source)}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER) as worker:
        worker.initialize()
        for batch in mini_batches()[:2]:
            train_step(worker.engine, batch)
        worker.save_checkpoint(target / "step-2", step=2)
        worker.export(target / "export")


def start(path: Path, settings: dict[str, Any]) -> tuple[Tensor | None, float, dict[str, Tensor]]:
    """Log-probabilities of this rank's share, loss of the step after, and the weights after that."""
    batch = mini_batches()[2]
    with fsdp2(path, settings) as engine:
        outputs = engine.infer_batch(share(engine, batch), loss=SFTLoss()).outputs
        metrics = train_step(engine, batch)
        return outputs.log_probs if outputs else None, metrics[0], weights(engine)


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {}), (3, {}), pytest.param(4, {"data_parallel_replicate_size": 2}, marks=pytest.mark.more)],
)
def test_equal_to_the_bit_to_a_start_from_the_export(
    size: int, settings: dict[str, Any], trained: Path, world: Any
) -> None:
    ours = world(size)(start, trained / "step-2", settings)
    theirs = world(size)(start, trained / "export", settings)
    for (log_probs, loss, after), (expected, their_loss, their_after) in zip(ours, theirs, strict=True):
        assert torch.equal(log_probs, expected)
        assert loss == their_loss
        assert after.keys() == their_after.keys()
        assert all(torch.equal(tensor, their_after[name]) for name, tensor in after.items())


def test_from_checkpoint_to_checkpoint_to_export(trained: Path, world: Any, tmp_path: Path) -> None:
    """The model stays whole, and once it is loaded its folder may go."""
    source = tmp_path / "step-2"
    shutil.copytree(trained / "step-2", source)
    world(2)(start_and_lose, source, tmp_path)
    files = ModelFiles.read(trained / "step-2").contents
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert ModelFiles.read(tmp_path / "step-3").contents == files
    theirs = ModelFiles.read(tmp_path / "export").contents
    assert {name: text for name, text in theirs.items() if name != "config.json"} == {
        name: text for name, text in files.items() if name != "config.json"
    }
    config, exported = (json.loads(text["config.json"]) for text in (files, theirs))
    assert {**config, "dtype": "float32"} == exported
    found = world(1)(start, tmp_path / "step-3", {})[0]
    expected = world(1)(start, tmp_path / "export", {})[0]
    assert torch.equal(found[0], expected[0])


def test_converted_it_is_the_export_to_the_byte(trained: Path, tmp_path: Path) -> None:
    """Without a run, and without the engine."""
    convert(trained / "step-2", tmp_path / "model")
    assert contents(tmp_path / "model") == contents(trained / "export")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start_and_lose(source: Path, target: Path) -> None:
    with TrainingWorker({"path": str(source)}, {"strategy": "fsdp2", "device": "cpu"}, OPTIMIZER) as worker:
        worker.initialize()
        train_step(worker.engine, mini_batches()[2])
        torch.distributed.barrier()
        shutil.rmtree(source, ignore_errors=True)
        worker.save_checkpoint(target / "step-3", step=3)
        worker.export(target / "export")


def test_resuming_a_run_that_started_from_a_checkpoint(trained: Path, world: Any, tmp_path: Path) -> None:
    """It is the same model still; the optimizer's state is the resumed run's, none is the first one's."""
    world(2)(save_at_start, trained / "step-2", tmp_path / "step-0")
    expected = world(1)(start, trained / "step-2", {})[0]
    assert world(1)(resume, trained / "step-2", tmp_path / "step-0")[0] == expected[1]
    with pytest.raises(AssertionError, match="belongs to another run"):
        world(1)(resume, tmp_path / "step-0", trained / "step-2", {**OPTIMIZER, "lr": 0.5})


def save_at_start(path: Path, target: Path) -> None:
    with fsdp2(path) as engine:
        engine.save_checkpoint(target)


def resume(path: Path, checkpoint: Path, optimizer: dict[str, Any] = OPTIMIZER) -> float:
    with fsdp2(path, optimizer=optimizer) as engine:
        engine.load_checkpoint(checkpoint)
        return train_step(engine, mini_batches()[2])[0]


def test_damaged_weights_are_named_on_every_rank(trained: Path, world: Any, tmp_path: Path) -> None:
    shutil.copytree(trained / "step-2", tmp_path / "step-2")
    file = tmp_path / "step-2/model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    messages: Callable[..., list[str]] = world(3)
    for message in messages(refusal, tmp_path / "step-2"):
        assert "model-00001-of-00002.safetensors has changed since it was written" in message


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, fsdp2(path):
        pass
    return str(caught.value)
