"""A value model at every layout is a transformers backbone with a linear head, and leaves as a folder of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.errors import CheckpointError, ConfigError
from engines.losses import SFTLoss
from engines.testing.plain import Run, ValueModel
from engines.testing.runs import OPTIMIZER, assert_metrics_agree, assert_weights_agree, same_bits, weights_of
from engines.testing.values import (
    ValueLoss,
    assert_values_agree,
    head_in,
    pack,
    plain_run,
    plain_values,
    scored_folder,
    train_values,
    valued,
    values_of,
    worker_of,
)
from engines.testing.world import World
from engines.worker import TrainingWorker
from support.megatron import LAYOUTS, fits, settings

Worlds = Callable[[int], World]
Folders = Callable[..., Path]

METRICS, WEIGHTS = 5e-6, 3e-5
FAMILIES = ("llama", "llama_tied", "qwen3", "qwen3_moe")
HELD = (
    *("single", "tp2", "tp2 sp", "pp2", "pp4 uneven", "pp2 vpp2"),
    *("cp2", "tp2 cp2", "pp2 dp2 distributed", "ep2", "pp2 ep2"),
)
BATCHING = ({}, {"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 128})

SAMPLES = valued()


@pytest.fixture(scope="module")
def scored(deep: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """`scored(family)`: a value model as transformers saves one."""
    return cache(lambda family: scored_folder(tmp_path_factory.mktemp("value") / family, deep(family)))


@pytest.fixture(scope="module")
def expected(scored: Folders) -> Callable[..., tuple[tuple[Tensor, Tensor], Run]]:
    """Values of the first mini-batch before training, and the run; of a reference model."""
    return cache(lambda family, size=8, **weights: plain_run(scored(family), valued(size), **weights))


def assert_trains_alike(
    ranks: Sequence[tuple[tuple[Tensor, Tensor], Run]], reference: tuple[tuple[Tensor, Tensor], Run]
) -> None:
    assert_values_agree([values for values, _ in ranks], reference[0])
    assert_metrics_agree([run for _, run in ranks], reference[1], METRICS)
    assert_weights_agree(ranks[0][1].weights, reference[1].weights, WEIGHTS)


def _cases() -> list[Any]:
    """Every layout with two families, every fourth with one of them in `make test`."""
    cases = []
    for place, layout in enumerate(HELD):
        able = [family for family in FAMILIES if fits(family, layout)]
        for number, family in enumerate(able):
            if number not in {place % len(able), (place + 1) % len(able)}:
                continue
            marks = () if place % 4 == 1 and number == place % len(able) else pytest.mark.more
            cases.append(pytest.param(family, layout, BATCHING[(place + number) % 3], marks=marks))
    return cases


@pytest.mark.parametrize(("family", "layout", "batching"), _cases())
def test_equals_a_backbone_with_a_linear_head(
    family: str, layout: str, batching: dict[str, int], scored: Folders, expected: Callable[..., Any], world: Worlds
):
    run = world(LAYOUTS[layout].processes)
    ranks = run(train_values, scored(family), SAMPLES, settings(layout, **batching), ValueLoss())
    assert_trains_alike(ranks, expected(family))


@pytest.mark.parametrize(
    "layout", ["tp2 sp", *(pytest.param(one, marks=pytest.mark.more) for one in ("cp2", "pp2 dp2 distributed"))]
)
def test_a_loss_of_last_values_alone(layout: str, scored: Folders, expected: Callable[..., Any], world: Worlds):
    run = world(LAYOUTS[layout].processes)
    ranks = run(train_values, scored("llama"), SAMPLES, settings(layout), ValueLoss(of_targets=0.0))
    assert_trains_alike(ranks, expected("llama", of_targets=0.0))


@pytest.mark.more
@pytest.mark.parametrize("layout", ["pp4 uneven", "pp2 dp2 distributed"])
def test_fewer_samples_than_ranks(layout: str, scored: Folders, expected: Callable[..., Any], world: Worlds):
    run = world(LAYOUTS[layout].processes)
    ranks = run(train_values, scored("llama_tied"), valued(1), settings(layout), ValueLoss())
    assert_trains_alike(ranks, expected("llama_tied", 1))


def start(folder: Path, engine: Mapping[str, Any], seed: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Weights of a worker that has just begun, and its values."""
    with worker_of(folder, engine, seed=seed) as worker:
        return weights_of(worker), values_of(worker, SAMPLES[0])


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.more), "llama_tied"])
def test_a_language_model_gets_a_head_that_depends_on_the_seed_alone(family: str, deep: Folders, world: Worlds):
    folder = deep(family)
    (first, values), *_ = world(1)(start, folder, settings("single"), 3)
    assert_values_agree([values], plain_values(ValueModel(folder, first["score.weight"]), SAMPLES[0]))
    for layout in ("pp2 vpp2", "tp2 cp2"):
        for weights, found in world(LAYOUTS[layout].processes)(start, folder, settings(layout), 3):
            assert same_bits(weights, first)
            assert_values_agree([found], values)
    (other, _), *_ = world(1)(start, folder, settings("single"), 4)
    assert not torch.equal(other.pop("score.weight"), first.pop("score.weight"))
    assert same_bits(other, first)


def train_and_export(
    folder: Path, engine: Mapping[str, Any], target: Path
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Weights and values after a step, which `target` then holds."""
    with worker_of(folder, engine) as worker:
        worker.train_mini_batch(pack(SAMPLES[0]), ValueLoss())
        worker.export(target)
        return weights_of(worker), values_of(worker, SAMPLES[1])


@pytest.mark.parametrize(
    ("family", "made_by", "layout", "other"),
    [
        ("llama", "deep", "pp2 vpp2", "tp2 sp"),
        ("llama_tied", "deep", "tp2 cp2", "pp2"),
        ("qwen3", "scored", "tp2", "cp2"),
        ("qwen3_moe", "deep", "pp2 ep2", "tp2 ep2"),
    ],
)
def test_transformers_and_any_layout_load_an_export(
    family: str,
    made_by: str,
    layout: str,
    other: str,
    request: pytest.FixtureRequest,
    world: Worlds,
    tmp_path: Path,
):
    from transformers import AutoModelForSequenceClassification

    source, target = request.getfixturevalue(made_by)(family), tmp_path / "export"
    weights, values = world(LAYOUTS[layout].processes)(train_and_export, source, settings(layout), target)[0]
    model, info = AutoModelForSequenceClassification.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not any(info.values()), info
    with torch.no_grad():
        scores = [model(torch.tensor([sample.input_ids])).logits for sample in SAMPLES[1]]
    torch.testing.assert_close(torch.cat(scores)[:, 0], values[1], rtol=1e-5, atol=5e-6)

    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "theirs"))
    assert ours == theirs

    for loaded, found in world(LAYOUTS[other].processes)(start, target, settings(other), 9):
        assert same_bits(loaded, weights)
        assert_values_agree([found], plain_values(ValueModel(target, head_in(target)), SAMPLES[0]))


def refusals(folder: Path, engine: Mapping[str, Any]) -> list[str]:
    """What asking a value model for a language model's outputs says."""
    said = []
    with worker_of(folder, engine) as worker:
        batch = pack(SAMPLES[0])
        for ask in (
            lambda: worker.infer_batch(batch),
            lambda: worker.infer_batch(batch, needs=("values", "entropy")),
            lambda: worker.evaluate(batch, SFTLoss()),
            lambda: worker.train_mini_batch(batch, SFTLoss()),
        ):
            try:
                ask()
            except ConfigError as error:
                said.append(error.message)
        assert worker.train_mini_batch(batch, ValueLoss())["skipped_step"] is None
    return said


def test_outputs_of_a_language_model_are_refused_on_every_rank(scored: Folders, world: Worlds):
    gives = "which a language_model gives; this engine is a value_model"
    for said in world(2)(refusals, scored("llama"), settings("pp2")):
        assert said == [
            f"the call asks for log_probs, {gives}",
            f"the call asks for entropy, {gives}",
            f"SFTLoss reads log_probs, {gives}",
            f"SFTLoss reads log_probs, {gives}",
        ]


def heads(folder: Path, engine: Mapping[str, Any]) -> list[Tensor]:
    """This rank's, though ranks were seeded differently."""
    with TrainingWorker({"path": str(folder)}, engine, model_type="value_model") as worker:
        torch.manual_seed(worker.rank)
        worker.initialize()
        return [chunk.score.weight.detach().clone() for chunk in worker.engine._base._chunks if chunk.post_process]


@pytest.mark.parametrize("layout", ["tp2 cp2", pytest.param("pp2 dp2 distributed", marks=pytest.mark.more)])
def test_all_ranks_of_a_last_stage_have_one_head(layout: str, deep: Folders, world: Worlds):
    found = [head for rank in world(4)(heads, deep("llama"), settings(layout)) for head in rank]
    assert len(found) == LAYOUTS[layout].processes // LAYOUTS[layout].engine.get("pipeline_parallel_size", 1)
    assert all(torch.equal(head, found[0]) for head in found)


def save_and_go_on(
    folder: Path, engine: Mapping[str, Any], checkpoint: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and metrics of a second step, a checkpoint before it."""
    with worker_of(folder, engine) as worker:
        worker.train_mini_batch(pack(SAMPLES[0]), ValueLoss())
        worker.save_checkpoint(checkpoint, step=1)
        metrics = worker.train_mini_batch(pack(SAMPLES[1]), ValueLoss())
        return weights_of(worker), metrics


def resume(folder: Path, engine: Mapping[str, Any], checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same second step, from the checkpoint; the seed, and with it the head, was another."""
    with worker_of(folder, engine, seed=11) as worker:
        worker.load_checkpoint(checkpoint)
        metrics = worker.train_mini_batch(pack(SAMPLES[1]), ValueLoss())
        return weights_of(worker), metrics


def load_as_language_model(folder: Path, engine: Mapping[str, Any], checkpoint: Path) -> str:
    with TrainingWorker({"path": str(folder)}, engine, OPTIMIZER) as worker:
        worker.initialize()
        try:
            worker.load_checkpoint(checkpoint)
        except CheckpointError as error:
            return str(error)
    raise AssertionError("it loaded")


def test_it_resumes_from_a_checkpoint_of_its_own(deep: Folders, world: Worlds, tmp_path: Path):
    folder, checkpoint = deep("llama_tied"), tmp_path / "step-1"
    layout = "pp2 dp2 distributed"
    weights, metrics = world(4)(save_and_go_on, folder, settings(layout), checkpoint)[0]
    for again, same_metrics in world(4)(resume, folder, settings(layout), checkpoint):
        assert same_bits(again, weights)
        assert same_metrics == metrics
    elsewhere, near = world(2)(resume, folder, settings("tp2 sp"), checkpoint)[0]
    assert_weights_agree(elsewhere, weights, WEIGHTS)
    assert near["loss"] == pytest.approx(metrics["loss"], rel=METRICS)
    assert near["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=METRICS)
    said = world(1)(load_as_language_model, folder, settings("single"), checkpoint)[0]
    assert "model_type: value_model in the checkpoint, language_model in this run" in said
