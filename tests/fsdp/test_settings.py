"""What can't be honoured is refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engines
from engines.errors import CapabilityError, ConfigError, EnginesError, LaunchError
from support.fsdp2 import OPTIMIZER


def create(folder: Path, settings: dict[str, Any], **kwargs: Any) -> engines.Engine:
    model = {"path": str(folder), "dtype": kwargs.pop("dtype", "float32")}
    return engines.create(model, {"strategy": "fsdp2", "device": "cpu", **settings}, OPTIMIZER, **kwargs)


def refusal(folder: Path, settings: dict[str, Any]) -> tuple[type, str]:
    with pytest.raises(EnginesError) as error:
        create(folder, settings)
    return error.type, str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"expert_parallel_size": 2},
        {"sequence_parallel": True},
        {"lora_rank": 8},
        {"moe_aux_loss_coefficient": 0.01},
    ],
    ids=str,
)
def test_capabilities_that_it_lacks(settings: dict[str, Any], folder: Callable[[str], Path]) -> None:
    kind, message = refusal(folder("llama"), settings)
    assert kind is CapabilityError
    assert f"engine.{next(iter(settings))}" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reshard_after_foward": True}, "reshard_after_forward"),
        ({"accumulate_gradients": "shard"}, "sharded"),
        ({"micro_batch_size": 1, "max_tokens_per_micro_batch": 9}, "max_tokens_per_micro_batch"),
    ],
)
def test_words_that_it_does_not_know(settings: dict[str, Any], words: str, folder: Callable[[str], Path]) -> None:
    kind, message = refusal(folder("llama"), settings)
    assert kind is ConfigError
    assert words in message


def test_replicas_that_do_not_divide_the_ranks(world: Any, folder: Callable[[str], Path]) -> None:
    for size, replicas in ((1, 2), (2, 4)):
        for kind, message in world(size)(refusal, folder("llama"), {"data_parallel_replicate_size": replicas}):
            assert kind is ConfigError
            assert f"{replicas} replicas don't divide {size} processes" in message


def test_one_process_needs_no_group_in_float32(folder: Callable[[str], Path]) -> None:
    with create(folder("llama"), {}) as engine:
        engine.initialize()
        assert engine.ranks.dp_group is None
        assert engine.describe()["layout"]["data_parallel_size"] == 1


def test_low_precision_needs_a_group(folder: Callable[[str], Path]) -> None:
    with create(folder("llama"), {}, dtype="bfloat16") as engine, pytest.raises(LaunchError, match="process group"):
        engine.initialize()
