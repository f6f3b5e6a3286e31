"""What an engine holds while it lives, and what is left when it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import engines
from engines.batch import TokenOutputs
from engines.contract import hookimpl
from engines.errors import ModelError
from engines.testing.samples import mini_batches
from support.fsdp2 import OPTIMIZER, Spy, fsdp2, share, train_step, weights

HYBRID = {"data_parallel_replicate_size": 2}


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def live_tensors() -> int:
    """Tensors of a model's size, wherever they are referred to."""
    gc.collect()
    return sum(1 for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and one.numel() > 500)


def open_and_close(folder: Path, settings: dict[str, Any]) -> None:
    with fsdp2(folder, settings) as engine:  # what torch and transformers keep for good
        train_step(engine, mini_batches()[0])
    tensors, before = live_tensors(), groups()
    with fsdp2(folder, settings) as engine:
        assert (groups() > before) == bool(settings), "only replicas need groups of their own"
        train_step(engine, mini_batches()[0])
        assert live_tensors() > tensors
    assert groups() == before
    assert live_tensors() <= tensors
    engine.close()


@pytest.mark.parametrize(("size", "settings"), [(1, {}), (2, {}), (2, HYBRID)], ids=str)
def test_close_frees_groups_and_memory(
    size: int, settings: dict[str, Any], world: Any, folder: Callable[[str], Path]
) -> None:
    world(size)(open_and_close, folder("llama"), settings)


def fail_to_initialize(folder: Path) -> None:
    tensors, before = live_tensors(), groups()
    engine = engines.create({"path": str(folder)}, {"strategy": "fsdp2", "device": "cpu", **HYBRID}, OPTIMIZER)
    with pytest.raises(ModelError):
        engine.initialize()
    engine.close()
    assert groups() == before
    assert live_tensors() <= tensors


def test_close_after_a_failed_initialize(world: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((folder("llama") / "config.json").read_bytes())
    world(2)(fail_to_initialize, broken)


def outlive(folder: Path) -> tuple[Any, Any]:
    first, second, _ = mini_batches()
    with ExitStack() as stack:
        other = stack.enter_context(fsdp2(folder, HYBRID))
        survivor = stack.enter_context(fsdp2(folder, HYBRID))
        train_step(other, second)
        expected = train_step(other, first)
        other.close()
        train_step(survivor, second)
        return expected, train_step(survivor, first)


def test_an_engine_outlives_another_of_its_layout(world: Any, folder: Callable[[str], Path]) -> None:
    """The second of two, whose tensors torch's caches would lay out on the first one's mesh."""
    for expected, found in world(2)(outlive, folder("llama")):
        assert found == expected


class Watch:
    """Keeps weak references to what each micro-batch's forward made: outputs, and activations of its graph."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    @hookimpl(wrapper=True)
    def forward_micro_batch(self, chunk: Any) -> Iterator[None]:
        self.alive.append(sum(one() is not None for one in self.seen))
        watching = chunk.layers()[0].register_forward_hook(lambda _, __, out: self.seen.append(weakref.ref(out)))
        outputs: TokenOutputs = yield
        watching.remove()
        self.seen.append(weakref.ref(outputs.log_probs))
        return outputs


def watch_training(folder: Path) -> list[int]:
    watch = Watch()
    with fsdp2(folder, {"micro_batch_size": 1}, wrappers=[watch]) as engine:
        train_step(engine, mini_batches()[0])
    return watch.alive


@pytest.mark.parametrize("size", [1, 2])
def test_outputs_and_graphs_die_with_their_micro_batch(size: int, world: Any, folder: Callable[[str], Path]) -> None:
    for alive in world(size)(watch_training, folder("llama")):
        assert len(alive) > 1, "one micro-batch tells nothing"
        assert set(alive) == {0}


def infer(folder: Path, settings: dict[str, Any]) -> None:
    spy = Spy()
    with fsdp2(folder, settings, wrappers=[spy]) as engine:
        outputs = engine.infer_batch(share(engine, mini_batches()[0]), needs=["log_probs", "entropy"]).outputs
        assert not outputs.log_probs.requires_grad
        assert not outputs.entropy.requires_grad
        assert all(isinstance(parameter, DTensor) for parameter in spy.model.parameters())
        assert all(parameter.grad is None for parameter in spy.model.parameters())


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}], ids=str)
def test_inference_leaves_only_shards(settings: dict[str, Any], world: Any, folder: Callable[[str], Path]) -> None:
    world(2)(infer, folder("llama"), settings)


def infer_train_infer(folder: Path) -> None:
    """A gathered copy that outlives the step would answer for the old weights."""
    first, second, _ = mini_batches()
    with fsdp2(folder) as engine, fsdp2(folder) as fresh:
        before = engine.infer_batch(share(engine, first)).outputs.log_probs
        expected = train_step(fresh, second)
        assert train_step(engine, second) == expected
        after = engine.infer_batch(share(engine, first)).outputs.log_probs
        assert torch.equal(after, fresh.infer_batch(share(fresh, first)).outputs.log_probs)
        assert not torch.equal(after, before)
        ours, theirs = weights(engine), weights(fresh)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("size", [1, 2])
def test_inference_before_training_changes_nothing(size: int, world: Any, folder: Callable[[str], Path]) -> None:
    world(size)(infer_train_infer, folder("llama_tied"))


def describe(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    with fsdp2(folder, settings) as engine:
        return engine.describe()


@pytest.mark.parametrize("settings", [{}, HYBRID], ids=str)
def test_describe_reads_what_was_built(settings: dict[str, Any], world: Any, folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder("llama_tied")).parameters())
    replicas = settings.get("data_parallel_replicate_size", 1)
    answers = world(2)(describe, folder("llama_tied"), settings)
    for answer in answers:
        assert answer["layout"]["data_parallel_size"] == 2
        assert answer["layout"]["data_parallel_replicate_size"] == replicas
        assert answer["layout"]["tensor_parallel_size"] == 1
    assert sum(answer["parameters"] for answer in answers) == replicas * whole


def infer_only(folder: Path) -> tuple[Any, Any]:
    batch = mini_batches()[0]
    with fsdp2(folder, optimizer=None) as frozen, fsdp2(folder) as trained:
        assert frozen._hook.extra_state() == {}
        return tuple(one.infer_batch(share(one, batch)).outputs.log_probs for one in (frozen, trained))


def test_an_engine_without_optimizer_infers(world: Any, folder: Callable[[str], Path]) -> None:
    for frozen, trained in world(2)(infer_only, folder("llama")):
        assert torch.equal(frozen, trained)
