"""The reference engine against a plain loop that knows nothing of engines; the kit holds it to the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import Engine
from engines.errors import EngineNotFound, ModelError
from engines.losses import SFTLoss
from engines.registry import registry
from engines.testing import plain
from engines.testing.plain import Run, Sample, ValueModel
from engines.testing.reference import reference_engine, register
from engines.testing.runs import OPTIMIZER, assert_metrics_agree, assert_weights_agree, pack, same_bits
from engines.testing.samples import mini_batches
from engines.testing.tiny import tiny_folder
from support.engine import opened, weights

Folders = Callable[[str], Path]
SETTINGS = {"strategy": "reference", "micro_batch_size": 3}
FAMILIES = (
    *("llama_tied", "qwen3_moe"),
    *(pytest.param(family, marks=pytest.mark.more) for family in ("gpt2", "gpt_oss", "gpt_neox", "mixtral")),
)


@contextmanager
def initialised(folder: Path, **more: Any) -> Iterator[Engine]:
    """A reference engine on the model in `folder`, closed at the end."""
    with reference_engine(), opened(folder, SETTINGS, **more) as engine:
        yield engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return cache(lambda family: tiny_folder(tmp_path_factory.mktemp("models"), family))


def step(engine: Engine, samples: list[Sample]) -> dict[str, Any]:
    metrics = engine.train_batch(pack(samples), SFTLoss())
    engine.lr_scheduler_step()
    return metrics


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_like_the_plain_loop(folders: Folders, family: str) -> None:
    run, batches = Run(), mini_batches()
    with initialised(folders(family), optimizer=OPTIMIZER) as engine:
        for samples in batches:
            run.lrs.append(engine.lr)
            metrics = step(engine, samples)
            run.losses.append(metrics["loss"])
            run.grad_norms.append(metrics["grad_norm"])
        found = weights(engine)
    expected = plain.train(folders(family), batches, **OPTIMIZER)
    assert_metrics_agree([run], expected)
    assert_weights_agree(found, expected.weights)


def test_it_says_what_the_plain_model_says(folders: Folders) -> None:
    from transformers import AutoModelForCausalLM

    samples = mini_batches()[0]
    with initialised(folders("llama_tied"), optimizer=None) as engine:
        found = engine.infer_batch(pack(samples), needs=("log_probs", "entropy")).outputs
    model = AutoModelForCausalLM.from_pretrained(folders("llama_tied"))
    for name, of_sequence in (("log_probs", plain.log_probs), ("entropy", plain.entropies)):
        expected = torch.cat([of_sequence(model, sample.input_ids) for sample in samples])
        torch.testing.assert_close(getattr(found, name), expected)


def test_its_value_model_is_the_plain_backbone_with_a_head(folders: Folders, tmp_path: Path) -> None:
    """Once with a new head on a language model, and once from the folder that this one leaves."""
    samples = mini_batches()[0]
    with initialised(folders("qwen3_moe"), optimizer=None, model_type="value_model") as engine:
        found = engine.infer_batch(pack(samples), needs=("values",)).outputs
        sent = weights(engine)
    model = ValueModel(folders("qwen3_moe"), sent["score.weight"])
    with torch.no_grad():
        after = [model.after_each_token(sample.input_ids) for sample in samples]
    torch.testing.assert_close(found.last_values, torch.stack([one[-1] for one in after]))
    torch.testing.assert_close(found.values, torch.cat([torch.cat([one.new_zeros(1), one[:-1]]) for one in after]))

    config = folders("qwen3_moe") / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    save_file(sent, tmp_path / "model.safetensors", {"format": "pt"})
    with initialised(tmp_path, optimizer=None, model_type="value_model") as engine:
        assert same_bits(weights(engine), sent)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_it_resumes_to_the_bit_and_starts_from_a_checkpoint(folders: Folders, family: str, tmp_path: Path) -> None:
    first, second, third = mini_batches(4)
    more = {"optimizer": {**OPTIMIZER, "schedule": "cosine"}, "total_steps": 4}
    with initialised(folders(family), **more) as engine:
        step(engine, first)
        step(engine, second)
        engine.save_checkpoint(tmp_path / "two", step=2)
        saved = weights(engine)
        rate = engine.lr
        expected = step(engine, third)
        after = weights(engine)
    with initialised(folders(family), **more) as engine:
        engine.load_checkpoint(tmp_path / "two")
        assert engine.lr == rate
        assert step(engine, third) == expected
        assert same_bits(weights(engine), after)
    with initialised(tmp_path / "two", optimizer=None) as engine:
        assert same_bits(weights(engine), saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop("model.norm.weight"), "missing_keys: model.norm.weight"),
        (lambda found: found.update(more=torch.ones(1)), "unexpected_keys: more"),
        (lambda found: found.update({"model.norm.weight": torch.ones(3)}), "mismatched_keys: .*model.norm.weight"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_weights_of_another_model_are_refused(folders: Folders, tmp_path: Path, change, says: str) -> None:
    folder = folders("llama_tied")
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=says), initialised(tmp_path):
        pass


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {}}')
    with pytest.raises(ModelError, match="quantized"), initialised(tmp_path):
        pass


def test_it_is_there_only_where_it_was_asked_for() -> None:
    with reference_engine():
        with reference_engine():
            register()
            assert [one.backend for one in registry.candidates()].count("reference") == 1
        assert registry.resolve("language_model", "reference").distribution == "in-process"
    with pytest.raises(EngineNotFound):
        registry.resolve("language_model", "reference")
