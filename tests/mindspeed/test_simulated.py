"""The engine of the distribution end to end, on simulated NPUs and a patched Megatron-Core, held to the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.errors import ConfigError, LaunchError
from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.plain import Run
from engines.testing.runs import (
    OPTIMIZER,
    assert_metrics_agree,
    assert_weights_agree,
    pack,
    same_bits,
    train_with_worker,
    weights_of,
)
from engines.testing.samples import mini_batches
from engines.testing.world import World
from engines.worker import TrainingWorker
from support.megatron import settings

METRICS, WEIGHTS = 5e-6, 3e-5
"""As for the same layouts on a CPU."""
SCHEDULE = {**OPTIMIZER, "weight_decay": 0.1}
FIRST_S = 280.0
"""The first run of a world imports all there is."""

Deep = Callable[[str], Path]


@pytest.fixture(scope="module")
def expected(deep: Deep) -> Callable[[str], Run]:
    return cache(lambda family: plain.train(deep(family), mini_batches(), **OPTIMIZER))


def at(case: str, device: str) -> dict[str, Any]:
    """`engine:` of a recipe for a layout's name, perhaps with "distributed" behind it."""
    layout = case.removesuffix(" distributed")
    return settings(layout, device=device, **({"distributed_optimizer": True} if layout != case else {}))


def fail_to_construct(folder: Path) -> None:
    """Groups that can't be made; then an engine with other arguments, which a living one would not allow."""
    from engines.loading import load
    from engines.registry import registry

    load(registry.resolve("language_model", "megatron", "npu"))  # before anything of Megatron is imported
    from engines_megatron import groups

    make = groups._make_replica_group

    def fail(layout: Any) -> Any:
        raise OSError("no more sockets")

    groups._make_replica_group = fail
    try:
        with pytest.raises(OSError, match="no more sockets"):
            TrainingWorker({"path": str(folder)}, at("tp2", "npu"), OPTIMIZER)
    finally:
        groups._make_replica_group = make
    with TrainingWorker({"path": str(folder)}, {**at("tp2", "npu"), "flash_attention": False}, OPTIMIZER) as worker:
        worker.initialize()


@pytest.mark.more
def test_a_constructor_that_fails_gives_its_arguments_back(npus: World, deep: Deep) -> None:
    npus(fail_to_construct, deep("llama"), timeout=FIRST_S)


def run_and_tell(
    folder: Path, engine: dict[str, Any], export_to: Path | None = None
) -> tuple[Run, str, list[tuple[str, Any]]]:
    """A run, whose engine it was, and what MindSpeed noted meanwhile."""
    import mindspeed
    from engines.registry import registry

    mindspeed.events.clear()
    run = train_with_worker(folder, mini_batches(), engine, export_to=export_to)
    owner = registry.resolve("language_model", "megatron", "npu").distribution
    return run, owner, list(mindspeed.events)


CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "tp2 sp": ("llama", {}, "flash"),
    "pp2": ("llama_tied", {}, "flash"),
    "dp2": ("qwen2", {}, "flash"),
    "dp2 distributed": ("qwen3", {}, "flash"),
    "cp2": ("llama", {}, "ring"),
    "ep2": ("qwen3_moe", {}, "flash"),
    "pp2 recomputed": ("llama", {"activation_checkpointing": True}, "flash"),
    "tp2 sp plain": ("llama", {"flash_attention": False}, None),
    "cp2 plain": ("llama", {"flash_attention": False}, None),
}


OFTEN = ("tp2 sp", "pp2", "dp2", "cp2")


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.more) for case in CASES]
)
def test_equals_the_reference(
    case: str, npus: World, deep: Deep, expected: Callable[[str], Run], tmp_path: Path
) -> None:
    family, more, attention = CASES[case]
    engine = at(case.removesuffix(" recomputed").removesuffix(" plain"), "npu") | more
    told = npus(run_and_tell, deep(family), engine, tmp_path, timeout=FIRST_S)
    assert {owner for _, owner, _ in told} == {"engines-mindspeed"}
    for _, _, events in told:
        assert [name for name, _ in events if name == "repatch"] == ["repatch"], "once for each engine"
        assert {name for name, _ in events} & {"flash", "ring"} == ({attention} if attention else set())
    runs = [run for run, _, _ in told]
    assert_metrics_agree(runs, expected(family), METRICS)
    assert_weights_agree(runs[0].weights, expected(family).weights, WEIGHTS)
    assert same_bits(load_file(tmp_path / "model.safetensors"), runs[0].weights), "what it trained is exported"


def run_part(
    folder: Path, engine: dict[str, Any], steps: range, load: Path | None, save: Path | None, dtype: str = "float32"
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of these steps of a run, and the weights in the end."""
    batches = mini_batches()
    with TrainingWorker({"path": str(folder), "dtype": dtype}, engine, SCHEDULE) as worker:
        worker.initialize()
        if load is not None:
            worker.load_checkpoint(load)
        metrics = [worker.train_mini_batch(pack(batches[step % len(batches)]), SFTLoss()) for step in steps]
        if save is not None:
            worker.save_checkpoint(save, step=steps.stop)
        return [(one["loss"], one["grad_norm"]) for one in metrics], weights_of(worker)


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        (("npu", "tp2 sp"), ("npu", "tp2 sp"), "float32"),
        pytest.param(("npu", "pp2"), ("npu", "pp2"), "float32", marks=pytest.mark.more),
        pytest.param(("npu", "dp2 distributed"), ("npu", "dp2 distributed"), "float32", marks=pytest.mark.more),
        pytest.param(("npu", "dp2"), ("npu", "dp2"), "bfloat16", marks=pytest.mark.more),
        (("npu", "dp2 distributed"), ("cpu", "pp2"), "float32"),
        pytest.param(("cpu", "tp2 sp"), ("npu", "pp2"), "float32", marks=pytest.mark.more),
    ],
    ids=str,
)
def test_goes_on_from_a_checkpoint(
    first: tuple[str, str], second: tuple[str, str], dtype: str, npus: World, world: Any, deep: Deep, tmp_path: Path
) -> None:
    """To the bit at the same place; MindSpeed's AdamW counts steps in another way than torch's on the CPU."""
    worlds = {"npu": npus, "cpu": world(2)}
    here, there = (
        partial(worlds[device], run_part, deep("llama_tied"), at(layout, device), dtype=dtype, timeout=FIRST_S)
        for device, layout in (first, second)
    )
    expected, whole = here(range(4), None, None)[0]
    here(range(2), None, tmp_path / "step-2")
    for found, weights in there(range(2, 4), tmp_path / "step-2", None):
        if first == second:
            assert found == expected[2:]
            assert same_bits(weights, whole)
        else:
            for ours, theirs in zip(found, expected[2:], strict=True):
                assert ours == pytest.approx(theirs, rel=METRICS)
            assert_weights_agree(weights, whole, WEIGHTS)


def two_engines(folder: Path) -> str:
    """An actor and its reference share a process; a third with other arguments is refused, and so is fsdp2.

    The reference names no device, and gets the NPU: that torch.cuda answers by then is MindSpeed's doing.
    """
    first, other = at("dp2", "npu"), at("dp2", "npu") | {"flash_attention": False}
    unnamed = {key: value for key, value in first.items() if key != "device"}
    model = {"path": str(folder)}
    with TrainingWorker(model, first, OPTIMIZER) as actor, TrainingWorker(model, unnamed) as frozen:
        assert torch.cuda.is_available() and frozen.device.type == "npu"
        actor.initialize()
        frozen.initialize()
        actor.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        with pytest.raises(ConfigError, match="other arguments of MindSpeed lives in this process"):
            TrainingWorker(model, other)
        with pytest.raises(LaunchError, match="must have its process to itself"):
            TrainingWorker(model, {"strategy": "fsdp2", "device": "npu"})
    with TrainingWorker(model, other) as plain:
        plain.initialize()
        return str(plain.device.type)


def test_engines_in_one_process(npus: World, deep: Deep) -> None:
    assert npus(two_engines, deep("llama"), timeout=FIRST_S) == ["npu", "npu"]


def values(folder: Path, engine: dict[str, Any]) -> tuple[float, float]:
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER, model_type="value_model") as worker:
        worker.initialize()
        outputs = worker.infer_batch(pack(mini_batches()[0]), needs=("values",)).outputs
        assert outputs.values is not None
        return float(outputs.values.double().sum()), float(outputs.values.abs().max())


def test_a_value_model(npus: World, world: Any, deep: Deep) -> None:
    expected = world(2)(values, deep("llama"), at("pp2", "cpu"), timeout=FIRST_S)
    for found, other in zip(npus(values, deep("llama"), at("pp2", "npu"), timeout=FIRST_S), expected, strict=True):
        assert found == pytest.approx(other, rel=1e-5)


def test_repatch_precedes_the_groups(npus: World, deep: Deep) -> None:
    for _, _, events in npus(run_and_tell, deep("llama"), settings("cp2", device="npu"), timeout=FIRST_S):
        names = [name for name, _ in events if name in ("repatch", "groups")]
        assert names == ["repatch", "groups"]
