"""A run goes on to the bit from its checkpoint, and at any number of processes from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.contract import Shard
from engines.errors import CheckpointError
from engines.testing.samples import mini_batches
from support.fsdp2 import OPTIMIZER, fsdp2, train_step, weights

DECAY = {**OPTIMIZER, "warmup_steps": 4}
"""A rate that depends on the position in the schedule."""
LAYOUTS = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "2 x 1": (2, {"data_parallel_replicate_size": 2}),
    "2 x 2": (4, {"data_parallel_replicate_size": 2}),
}

Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def run(
    folder: Path, settings: dict[str, Any], steps: range, load: Path | None = None, save: Path | None = None
) -> Outcome:
    batches = mini_batches()
    with fsdp2(folder, settings, optimizer=DECAY) as engine:
        if load is not None:
            engine.load_checkpoint(load)
        metrics = [train_step(engine, batches[step % len(batches)]) for step in steps]
        if save is not None:
            engine.save_checkpoint(save, step=steps.stop)
        return metrics, weights(engine)


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("llama_tied", "2", "2"),
        ("qwen3_moe", "4", "2"),
        ("qwen3_moe", "2", "1"),
        ("llama_tied", "2 x 2", "1"),
        pytest.param("llama_tied", "1", "1", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "2", "2", marks=pytest.mark.more),
        pytest.param("llama_tied", "1", "4", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "2", "2 x 1", marks=pytest.mark.more),
    ],
)
def test_goes_on_where_it_stopped(
    family: str, first: str, second: str, world: Any, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (size, settings), (next_size, next_settings) = LAYOUTS[first], LAYOUTS[second]
    metrics, whole = world(size)(run, folder(family), settings, range(4))[0]
    world(size)(run, folder(family), settings, range(2), save=tmp_path / "step-2")
    resumed = world(next_size)(run, folder(family), next_settings, range(2, 4), load=tmp_path / "step-2")
    for found, weights_found in resumed:
        if first == second:
            assert found == metrics[2:]
            assert all(torch.equal(weights_found[name], whole[name]) for name in whole)
        else:
            for ours, theirs in zip(found, metrics[2:], strict=True):
                assert ours == pytest.approx(theirs, rel=2e-6)
            for name in whole:
                torch.testing.assert_close(weights_found[name], whole[name], rtol=1e-5, atol=1e-6)


def test_before_the_first_step(world: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """AdamW has no state yet; a checkpoint of that resets an engine that has some."""
    world(2)(run, folder("llama"), {}, range(0), save=tmp_path / "step-0")
    expected = world(2)(run, folder("llama"), {}, range(2))[0]
    for metrics, found in world(2)(forget, folder("llama"), tmp_path / "step-0"):
        assert metrics == expected[0]
        assert all(torch.equal(found[name], value) for name, value in expected[1].items())


def forget(folder: Path, checkpoint: Path) -> Outcome:
    batches = mini_batches()
    with fsdp2(folder, optimizer=DECAY) as engine:
        train_step(engine, batches[2])
        engine.load_checkpoint(checkpoint)
        return [train_step(engine, batch) for batch in batches[:2]], weights(engine)


def list_shards(folder: Path, settings: dict[str, Any]) -> list[Shard]:
    from engines.contract import hookimpl

    class Take:
        taken: list[Shard]

        @hookimpl(wrapper=True)
        def shards(self) -> Any:
            self.taken = list((yield))
            return iter(self.taken)

    take = Take()
    with fsdp2(folder, settings, wrappers=[take]) as engine:
        train_step(engine, mini_batches()[0])
        list(engine._hook.shards(parts=frozenset({"model", "optimizer"})))
    return [Shard(s.key, s.global_shape, s.offset, s.tensor.clone(), s.replica) for s in take.taken]


@pytest.mark.parametrize("layout", ["2", "4", "2 x 2"])
def test_blocks_cover_each_tensor_once(layout: str, world: Any, folder: Callable[[str], Path]) -> None:
    size, settings = LAYOUTS[layout]
    everyone = world(size)(list_shards, folder("llama_tied"), settings)
    keys = [shard.key for shard in everyone[0]]
    assert len(keys) == len(set(keys))
    assert not any("lm_head" in key for key in keys), "tied to the embedding"
    for key in keys:
        held = [shard for shards in everyone for shard in shards if shard.key == key]
        count = torch.zeros(held[0].global_shape, dtype=torch.int64)
        for shard in held:
            block = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
            count[block] += shard.replica == 0
        assert (count == 1).all(), key


def load_other(folder: Path, checkpoint: Path) -> None:
    with fsdp2(folder) as engine, pytest.raises(CheckpointError):
        engine.load_checkpoint(checkpoint)


def test_another_model_is_refused(world: Any, folder: Callable[[str], Path], tmp_path: Path) -> None:
    world(1)(run, folder("llama"), {}, range(1), save=tmp_path / "step-1")
    world(1)(load_other, folder("qwen3"), tmp_path / "step-1")
