"""Real engines through the whole of it: saving beside training, planted pickles, checkpoints of some parts only."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engines import checkpoint
from engines.checkpoint.convert import convert
from engines.engine import create
from engines.errors import CheckpointError, ConfigError, EnginesError
from engines.losses import SFTLoss
from engines.recipes.data.tokenizing import load_tokenizer
from engines.testing.runs import OPTIMIZER, pack
from engines.testing.samples import mini_batches
from engines.testing.tiny import tiny_folder
from engines.worker import TrainingWorker
from support.checkpoints import written
from support.tokenizer import tiny_tokenizer

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2", "device": "cpu"},
    "megatron": {"strategy": "megatron", "device": "cpu", "pipeline_parallel_size": 2},
}
Worlds = Callable[[int], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer."""
    folder = tiny_folder(tmp_path_factory.mktemp("model"), "llama")
    tiny_tokenizer(folder)
    return folder


def steps(worker: TrainingWorker, *numbers: int) -> None:
    for number in numbers:
        worker.train_mini_batch(pack(mini_batches()[number % 3]), SFTLoss())


def save_both_ways(model: Path, engine: dict[str, Any], target: Path) -> None:
    with TrainingWorker({"path": str(model)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        for number in (1, 2):
            steps(worker, number)
            contents = ("model", "optimizer", "state", "huggingface")
            worker.save_checkpoint(target / f"now-{number}", step=number, contents=contents)
            worker.save_checkpoint(target / f"step-{number}", step=number, contents=contents, background=True)
        steps(worker, 3)
        worker.save_checkpoint(target / "step-3", step=3, background=True)
        worker.export(target / "export")
    assert checkpoint.open(target / "step-3").info.step == 3, "closing waits for it"


@pytest.mark.parametrize("engine", ENGINES)
def test_saved_beside_training_it_is_the_same_to_the_byte(
    engine: str, model: Path, world: Worlds, tmp_path: Path
) -> None:
    """Its Hugging Face copy too, which is what an export would have been."""
    world(2)(save_both_ways, model, ENGINES[engine], tmp_path)
    for number in (1, 2):
        assert written(tmp_path / f"step-{number}") == written(tmp_path / f"now-{number}")
    assert checkpoint.open(tmp_path / "step-1").manifest.held == ("model", "optimizer", "state", "huggingface")
    convert(tmp_path / "step-2", tmp_path / "converted")
    assert written(tmp_path / "step-2/huggingface") == written(tmp_path / "converted")
    convert(tmp_path / "step-3", tmp_path / "last")
    assert written(tmp_path / "export") == written(tmp_path / "last")


CHAINS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "fsdp2, replicas to plain to one": [
        (4, {"strategy": "fsdp2", "data_parallel_replicate_size": 2}),
        (2, {"strategy": "fsdp2"}),
        (1, {"strategy": "fsdp2"}),
    ],
    "fsdp2, four to two with replicas to one": [
        (4, {"strategy": "fsdp2"}),
        (2, {"strategy": "fsdp2", "data_parallel_replicate_size": 2}),
        (1, {"strategy": "fsdp2"}),
    ],
    "megatron, tensors to pipeline to one": [
        (4, {"strategy": "megatron", "tensor_parallel_size": 2}),
        (2, {"strategy": "megatron", "pipeline_parallel_size": 2}),
        (1, {"strategy": "megatron"}),
    ],
    "megatron, pipeline to tensors to one": [
        (4, {"strategy": "megatron", "pipeline_parallel_size": 2}),
        (2, {"strategy": "megatron", "tensor_parallel_size": 2}),
        (1, {"strategy": "megatron"}),
    ],
}


def one_more_step(model: Path, engine: dict[str, Any], folder: Path, number: int) -> tuple[float, float]:
    """Loss and gradient norm of step `number`, from and to a checkpoint."""
    with TrainingWorker({"path": str(model)}, {**engine, "device": "cpu"}, OPTIMIZER) as worker:
        worker.initialize()
        if number > 1:
            worker.load_checkpoint(folder / f"step-{number - 1}")
        metrics = worker.train_mini_batch(pack(mini_batches()[number % 3]), SFTLoss())
        worker.save_checkpoint(folder / f"step-{number}", step=number)
        return metrics["loss"], metrics["grad_norm"]


@pytest.mark.more
@pytest.mark.parametrize("chain", CHAINS)
def test_each_step_at_another_layout(chain: str, model: Path, world: Worlds, tmp_path: Path) -> None:
    """Four processes, two, and one: losses, norms and weights are those of one process of fsdp2 all along."""
    layouts = CHAINS[chain]
    for number, (size, engine) in enumerate(layouts, start=1):
        alone = world(1)(one_more_step, model, {"strategy": "fsdp2"}, tmp_path / "alone", number)[0]
        for found in world(size)(one_more_step, model, engine, tmp_path / "chain", number):
            assert found == pytest.approx(alone, rel=2e-5), f"step {number} on {size}"
    for name in ("alone", "chain"):
        convert(tmp_path / name / "step-3", tmp_path / f"{name}-weights")
    alone, found = (load_file(tmp_path / f"{name}-weights/model.safetensors") for name in ("alone", "chain"))
    assert alone.keys() == found.keys()
    for key, tensor in alone.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)


def fail_in_the_background(model: Path, engine: dict[str, Any], target: Path) -> str:
    """The folder that the checkpoint is to lie in goes after the copy was taken, before it is complete."""
    with TrainingWorker({"path": str(model)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        steps(worker, 0)
        worker.save_checkpoint(target / "gone/step-1", step=1, background=True)
        worker.engine._saver._thread.join()
        dist.barrier()
        if worker.rank == 0:
            shutil.rmtree(target / "gone")
        with pytest.raises(CheckpointError) as caught:
            steps(worker, 1)
        steps(worker, 1)
        worker.save_checkpoint(target / "step-2", step=2, background=True)
    return str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_its_error_comes_up_at_the_next_step_on_all_ranks(
    engine: str, model: Path, world: Worlds, tmp_path: Path
) -> None:
    for message in world(2)(fail_in_the_background, model, ENGINES[engine], tmp_path):
        assert message.startswith(f"cannot save {tmp_path}/gone/step-1: ") and "No such file" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def save(model: Path, engine: dict[str, Any], target: Path, contents: tuple[Any, ...]) -> None:
    with TrainingWorker({"path": str(model)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        steps(worker, 0)
        worker.save_checkpoint(target, step=1, contents=contents)


def resume(model: Path, engine: dict[str, Any], paths: list[Path]) -> list[str]:
    """What is said about each, and that all can be said by one engine, since nothing of it is loaded."""
    said = []
    with TrainingWorker({"path": str(model)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        for path in paths:
            with pytest.raises(CheckpointError) as caught:
                worker.load_checkpoint(path)
            said.append(str(caught.value))
    return said


def start_from(engine: dict[str, Any], path: Path) -> str | None:
    """What is said about weights, and nothing about what isn't read for them."""
    try:
        made = create({"path": str(path)}, engine, OPTIMIZER)
        with made:
            made.initialize()
        load_tokenizer(path)
    except EnginesError as error:
        return str(error)
    return None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pickle_in_any_file_is_reported_and_not_run(
    engine: str, model: Path, world: Worlds, tmp_path: Path
) -> None:
    ranks, mark = world(2), tmp_path / "executed"
    ranks(save, model, ENGINES[engine], tmp_path / "step-1", ("model", "optimizer", "state", "huggingface"))
    planted = {}
    for name in written(tmp_path / "step-1"):
        planted[name] = tmp_path / f"{name.replace('/', '-')}"
        shutil.copytree(tmp_path / "step-1", planted[name])
        file = planted[name] / name
        torch.save(Payload(mark), file) if name.endswith("safetensors") else file.write_bytes(
            pickle.dumps(Payload(mark))
        )
    assert {name.rpartition("-of-")[0].partition("-")[0] for name in planted if "-of-" in name} == {
        "model",
        "optimizer",
        "rank",
    }
    for said in ranks(resume, model, ENGINES[engine], list(planted.values())):
        for name, message in zip(planted, said, strict=True):
            assert f"{planted[name]}/{name}" in message
    for name in ("model-00000-of-00002.safetensors", "config.json", "tokenizer.json", "index.json", "manifest.json"):
        for message in ranks(start_from, ENGINES[engine], planted[name]):
            assert f"{planted[name]}/{name}" in (message or "")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        copy = planted[f"huggingface/{name}"] / "huggingface"
        for message in ranks(start_from, ENGINES[engine], copy):
            assert str(copy) in (message or ""), name
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the payload of this test is harmless"


@pytest.mark.parametrize("engine", ENGINES)
def test_some_parts_alone(engine: str, model: Path, world: Worlds, tmp_path: Path) -> None:
    """They start a run, and go on with none."""
    ranks = world(2)
    ranks(save, model, ENGINES[engine], tmp_path / "weights", ("model",))
    ranks(save, model, ENGINES[engine], tmp_path / "optimizer", ("model", "optimizer"))
    ranks(save, model, ENGINES[engine], tmp_path / "copy", ("huggingface",))
    assert not any(name.startswith(("optimizer", "rank", "state")) for name in written(tmp_path / "weights"))
    assert not any(name.startswith(("model", "rank", "state")) for name in written(tmp_path / "copy"))
    for said in ranks(resume, model, ENGINES[engine], [tmp_path / name for name in ("weights", "optimizer", "copy")]):
        assert "weights holds model, but not optimizer and state: no run can go on from it" in said[0]
        assert "optimizer holds model, optimizer, but not state" in said[1]
        assert "copy holds huggingface, but not model and optimizer and state" in said[2]
    for message in ranks(start_from, ENGINES[engine], tmp_path / "copy"):
        assert message == (
            f"{tmp_path}/copy holds huggingface, but not model\nIts Hugging Face copy is {tmp_path}/copy/huggingface."
        )
    for path in ("weights", "copy/huggingface"):
        assert ranks(start_from, ENGINES[engine], tmp_path / path) == [None, None]


def test_contents_of_no_use(model: Path, world: Worlds, tmp_path: Path) -> None:
    world(1)(refuse, model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def refuse(model: Path, target: Path) -> None:
    with TrainingWorker({"path": str(model)}, ENGINES["fsdp2"], OPTIMIZER) as worker:
        worker.initialize()
        for contents, message in [
            (("model", "optimiser"), "can't hold 'optimiser'. Did you mean \"optimizer\"?"),
            (("optimizer", "state"), "model or huggingface must be among them"),
            (("huggingface", "state"), "of no use without model"),
        ]:
            with pytest.raises(ConfigError) as caught:
                worker.save_checkpoint(target / "step-1", contents=contents)
            assert message in str(caught.value)
        for use in (worker.save_checkpoint, worker.load_checkpoint, worker.export):
            with pytest.raises(EnginesError, match="memory://there is a URL"):
                use("memory://there")
