"""What engines share in a process while they live, and what is left when they are closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engines
from engines.errors import ConfigError, LaunchError, ModelError
from engines.testing.samples import mini_batches
from engines.testing.world import World
from support.engine import OPTIMIZER, live_groups, live_tensors, opened, share, train_step
from support.megatron import LAYOUTS, settings
from support.megatron_engine import megatron, process_wide

Worlds = Callable[[int], World]
Deep = Callable[..., Path]

FIRST, SECOND, THIRD = mini_batches()


def open_and_close(folder: Path, layout: str) -> None:
    with megatron(folder, layout) as engine:  # what torch, transformers and Megatron keep for good
        train_step(engine, FIRST)
    tensors, groups, before = live_tensors(), live_groups(), process_wide()
    random = torch.get_rng_state().tolist()
    with megatron(folder, layout) as engine:
        during = process_wide()
        assert live_groups() > groups and during["random states"] and during != before
        train_step(engine, FIRST)
        engine.infer_batch(share(engine, SECOND))
        assert live_tensors() > tensors
        assert torch.get_rng_state().tolist() == random
    engine.close()
    assert live_groups() == groups
    assert process_wide() == before
    assert not before["random states"] and before["auxiliary scale"] is None
    assert not any("ProcessGroup" in value for value in before.values() if isinstance(value, str))
    assert live_tensors() <= tensors


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", "tp2 sp"),
        ("llama_tied", "pp2 vpp2"),
        pytest.param("llama", "single", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "ep2", marks=pytest.mark.more),
        pytest.param("llama", "cp2", marks=pytest.mark.more),
        ("llama_tied", "pp2 dp2 distributed"),
    ],
)
def test_close_frees_groups_memory_and_random_states(family: str, layout: str, world: Worlds, deep: Deep) -> None:
    world(LAYOUTS[layout].processes)(open_and_close, deep(family), layout)


def open_often(folder: Path, layout: str, times: int) -> list[tuple[int, int, int]]:
    import psutil

    seen = []
    for _ in range(times):
        with megatron(folder, layout) as engine:
            train_step(engine, FIRST[:2])
        seen.append((live_groups(), live_tensors(), psutil.Process().memory_info().rss))
    return seen


@pytest.mark.more
def test_twenty_engines_one_after_another(world: Worlds, deep: Deep) -> None:
    folder = deep("qwen3_moe", num_hidden_layers=2)
    for seen in world(2)(open_often, folder, "tp2 sp", 20):
        groups, tensors, memory = zip(*seen, strict=True)
        assert set(groups) == {groups[0]}
        assert set(tensors[1:]) == {tensors[1]}
        assert memory[-1] - memory[4] < 8 * 2**20, f"bytes after each engine: {memory}"


def another_layout(folder: Path) -> None:
    with megatron(folder, "tp2") as engine:
        train_step(engine, FIRST)
        groups, state = live_groups(), process_wide()
        with pytest.raises(ConfigError, match=r"tp=2 pp=1 .* lives in this process, where one of tp=1 pp=2 "):
            engines.create({"path": str(folder)}, settings("pp2"), OPTIMIZER)
        assert (live_groups(), process_wide()) == (groups, state)
        found = train_step(engine, SECOND)
    with megatron(folder, "tp2") as engine:
        train_step(engine, FIRST)
        assert train_step(engine, SECOND) == found
    with megatron(folder, "pp2") as engine:
        assert train_step(engine, FIRST)[0] > 0


def test_another_layout_beside_a_living_engine(world: Worlds, deep: Deep) -> None:
    world(2)(another_layout, deep("llama"))


def fail_to_initialize(broken: Path, good: Path) -> None:
    tensors, groups, before = live_tensors(), live_groups(), process_wide()
    engine = engines.create({"path": str(broken)}, settings("tp2 sp"), OPTIMIZER)
    with pytest.raises(ModelError), engine:
        engine.initialize()
    assert (live_groups(), process_wide()) == (groups, before)
    assert live_tensors() <= tensors
    with megatron(good, "pp2") as engine:
        train_step(engine, FIRST)


def test_close_after_a_failed_initialize(world: Worlds, deep: Deep, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((deep("llama") / "config.json").read_bytes())
    world(2)(fail_to_initialize, tmp_path, deep("llama"))


def fail_to_construct(folder: Path) -> None:
    from engines_megatron import groups

    make, before = groups._make_replica_group, (live_groups(), process_wide())

    def make_half(layout: Any) -> Any:
        make(layout)
        raise OSError("no more sockets")

    groups._make_replica_group = make_half
    try:
        with pytest.raises(OSError, match="no more sockets"):
            engines.create({"path": str(folder)}, settings("tp2"), OPTIMIZER)
    finally:
        groups._make_replica_group = make
    assert (live_groups(), process_wide()) == before
    with megatron(folder, "pp2") as engine:
        train_step(engine, FIRST)


def test_a_constructor_that_fails_frees_its_groups(world: Worlds, deep: Deep) -> None:
    world(2)(fail_to_construct, deep("llama"))


def megatron_used_by_others(folder: Path) -> None:
    from megatron.core import parallel_state

    before = live_groups()
    known = set(torch.distributed.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    theirs = process_wide()
    try:
        with pytest.raises(LaunchError, match="initialised in this process, but not by an engine"):
            engines.create({"path": str(folder)}, settings("tp2"), OPTIMIZER)
        assert process_wide() == theirs
    finally:
        parallel_state.destroy_model_parallel()
        for group in set(torch.distributed.distributed_c10d._world.pg_map) - known:
            torch.distributed.destroy_process_group(group)
    assert live_groups() == before
    with megatron(folder, "tp2") as engine:
        train_step(engine, FIRST)


def test_megatron_initialised_by_other_code(world: Worlds, deep: Deep) -> None:
    world(2)(megatron_used_by_others, deep("llama"))


def test_without_a_process_group(deep: Deep) -> None:
    with pytest.raises(LaunchError, match=r"torch\.distributed.*also for one process"):
        engines.create({"path": str(deep("llama"))}, settings("single"), OPTIMIZER)


def beside_fsdp2(folder: Path, layout: str) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    with opened(folder, {"strategy": "fsdp2", "device": "cpu"}) as fsdp2, megatron(folder, layout) as engine:
        return [(train_step(fsdp2, samples), train_step(engine, samples)) for samples in (FIRST, SECOND, THIRD)]


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_moe", "tp2 sp"), pytest.param("llama_tied", "pp2", marks=pytest.mark.more)]
)
def test_fsdp2_and_megatron_in_one_process(family: str, layout: str, world: Worlds, deep: Deep) -> None:
    for steps in world(2)(beside_fsdp2, deep(family), layout):
        for ours, theirs in steps:
            assert ours == pytest.approx(theirs, rel=5e-6)
