"""The engine of the distribution end to end, on simulated NPUs and a patched Megatron-Core, held to the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import reference
from support.megatron import settings
from support.parity import OPTIMIZER, assert_metrics_agree, assert_weights_agree, train_with_worker
from support.reference import Run
from support.samples import mini_batches
from support.world import World

METRICS, WEIGHTS = 5e-6, 3e-5
"""As for the same layouts on a CPU."""
FIRST_S = 280.0
"""The first run of a world imports all there is."""

Deep = Callable[[str], Path]


@pytest.fixture(scope="module")
def expected(deep: Deep) -> Callable[[str], Run]:
    return cache(lambda family: reference.train(deep(family), mini_batches(), **OPTIMIZER))


def run_and_tell(folder: Path, engine: dict[str, Any]) -> tuple[Run, str, list[tuple[str, Any]]]:
    """A run, whose engine it was, and what MindSpeed noted meanwhile."""
    from engines.registry import registry

    if "mindspeed" in __import__("sys").modules:
        __import__("mindspeed").events.clear()
    run = train_with_worker(folder, mini_batches(), engine)
    owner = registry.resolve("language_model", "megatron", "npu").distribution
    return run, owner, list(__import__("mindspeed").events)


CASES = {
    "tp2 sp": ("llama", {}, "flash"),
    "pp2": ("llama_tied", {}, "flash"),
    "dp2": ("qwen2", {}, "flash"),
    "dp2 distributed": ("qwen3", {"distributed_optimizer": True}, "flash"),
    "cp2": ("llama", {}, "ring"),
    "ep2": ("qwen3_moe", {}, "flash"),
    "pp2 recomputed": ("llama", {"activation_checkpointing": True}, "flash"),
    "tp2 sp plain": ("llama", {"flash_attention": False}, None),
    "cp2 plain": ("llama", {"flash_attention": False}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, npus: World, deep: Deep, expected: Callable[[str], Run]) -> None:
    family, more, attention = CASES[case]
    layout = case.removesuffix(" distributed").removesuffix(" recomputed").removesuffix(" plain")
    engine = settings(layout, device="npu", **more)
    told = npus(run_and_tell, deep(family), engine, timeout=FIRST_S)
    assert {owner for _, owner, _ in told} == {"engines-mindspeed"}
    for _, _, events in told:
        assert [name for name, _ in events if name == "repatch"] == ["repatch"], "once for each engine"
        assert {name for name, _ in events} & {"flash", "ring"} == ({attention} if attention else set())
    runs = [run for run, _, _ in told]
    assert_metrics_agree(runs, expected(family), METRICS)
    assert_weights_agree(runs[0].weights, expected(family).weights, WEIGHTS)


def test_repatch_precedes_the_groups(npus: World, deep: Deep) -> None:
    for _, _, events in npus(run_and_tell, deep("llama"), settings("cp2", device="npu"), timeout=FIRST_S):
        names = [name for name, _ in events if name in ("repatch", "groups")]
        assert names == ["repatch", "groups"]
