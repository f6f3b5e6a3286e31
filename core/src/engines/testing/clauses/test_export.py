"""Weights leave an engine as `save_pretrained` of the plain model writes them, whatever the layout, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.contract import ExportPlan
from engines.losses import SFTLoss
from engines.testing import plain
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.live import live_bytes, opened
from engines.testing.runs import OPTIMIZER, pack, weights_of
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

DEEP = 8
"""Layers of a model whose largest piece, a layer or an embedding, is small beside the whole."""
BUCKET = 0.3
"""The largest share of such a model's bytes that a stream holds beside it."""
LOG_PROBS = 2e-5
"""Largest difference of a log-probability between the engine and the folder that it wrote."""


def export(folder: Path, settings: dict[str, Any], plan: ExportPlan | None = None) -> list[tuple[str, Tensor]]:
    """The stream of an engine that has only loaded the model, in its order."""
    with TrainingWorker({"path": str(folder)}, settings) as worker:
        worker.initialize()
        return [(name, tensor.to("cpu", copy=True)) for name, tensor in worker.engine.get_per_tensor_param(plan)[0]]


def assert_is_exported(everyone: list[list[tuple[str, Tensor]]], folder: Path) -> None:
    """Each rank's stream holds the tensors of the folder, to the bit, in the same order."""
    saved = load_file(folder / "model.safetensors")
    order = [name for name, _ in everyone[0]]
    for rank, stream in enumerate(everyone):
        names = [name for name, _ in stream]
        faults = {
            "twice": {name for name in names if names.count(name) > 1},
            "not at all": saved.keys() - set(names),
            "though save_pretrained doesn't write it": set(names) - saved.keys(),
        }
        found = [f"{', '.join(sorted(which))} {fault}" for fault, which in faults.items() if which]
        assert not found, f"rank {rank} streams {'; and '.join(found)}"
        wrong = differences(dict(stream), saved)
        assert not wrong, f"rank {rank} streams something else than was loaded: {'; '.join(wrong)}"
        assert names == order, f"rank {rank} streams in another order than rank 0: {names} and {order}"


def differences(found: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """A few words on each tensor of both that isn't equal to the bit."""
    words = []
    for name in sorted(saved.keys() & found.keys()):
        one, expected = found[name], saved[name]
        if (one.shape, one.dtype) != (expected.shape, expected.dtype):
            words.append(
                f"{name} is {one.dtype} {tuple(one.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
            )
        elif not torch.equal(one, expected):
            off = (one.double() - expected.double()).abs()
            words.append(
                f"{name} differs in {int((off > 0).sum())} of {off.numel()} elements, by up to {off.max():.1e}"
            )
    return words


@clause("checkpoints.md#exports", needs=("export",))
def test_what_was_loaded_is_exported_to_the_bit(
    subject: Subject, layout: Layout, on_ranks: OnRanks, model: Model
) -> None:
    """Before any step the stream holds, on every rank and in the same order, the tensors of the folder that was
    loaded, to the bit, at every layout: names, shapes and dtypes are those of `save_pretrained`.
    """
    folder = model(subject.family_at(layout))
    assert_is_exported(on_ranks(layout, export, folder, subject.settings(layout)), folder)


@clause("engines.contract:BaseEngine.iter_weights", needs=("export",))
def test_every_model_is_exported_to_the_bit(
    any_model: str, subject: Subject, on_ranks: OnRanks, model: Model
) -> None:
    """So is every model that the engine builds: a tied head is left out, an untied one is there, experts come one by
    one.
    """
    assert_is_exported(on_ranks(SINGLE, export, model(any_model), subject.settings()), model(any_model))


def export_twice(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As bfloat16, and after that as it comes."""
    with TrainingWorker({"path": str(folder)}, settings) as worker:
        worker.initialize()
        low, _ = worker.engine.get_per_tensor_param(ExportPlan(dtype=torch.bfloat16))
        return {name: tensor.to("cpu", copy=True) for name, tensor in low}, weights_of(worker)


@clause("engines.contract:ExportPlan", needs=("export",))
def test_a_plan_decides_the_dtype(subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """Floating-point tensors are cast to the plan's `dtype`, else they leave as `ModelConfig.dtype`; the engine keeps
    its own.
    """
    folder = model(subject.family_at(some_layout))
    saved = load_file(folder / "model.safetensors")
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in saved.items()}
    for rank, (low, after) in enumerate(on_ranks(some_layout, export_twice, folder, subject.settings(some_layout))):
        wrong = differences(low, expected)
        assert not wrong, f"rank {rank} exports something else than bfloat16: {'; '.join(wrong)}"
        wrong = differences(after, saved)
        assert not wrong, f"after an export as bfloat16, rank {rank} holds something else: {'; '.join(wrong)}"


def watch(folder: Path, settings: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Bytes of the whole stream, and bytes that live beside the model at three of its tensors."""
    with opened(folder, settings, optimizer=None) as engine:
        names = [name for name, _ in engine.get_per_tensor_param()[0]]
        looked_at = {names[0]: "first", names[len(names) // 2]: "middle one", names[-1]: "last"}
        total, held, before = 0, {}, live_bytes()
        stream, _ = engine.get_per_tensor_param()
        for name, tensor in stream:
            total += tensor.nbytes
            if name in looked_at:
                held[looked_at[name]] = live_bytes() - before
        return total, held


@clause("engines.contract:BaseEngine.iter_weights", needs=("export",))
def test_the_stream_is_lazy(subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model) -> None:
    """The first tensor arrives before the last is made, and what has been taken is let go: beside the model one
    bucket is held, at most some layers' worth.
    """
    folder = model(subject.family_at(some_layout), num_hidden_layers=DEEP)
    for rank, (total, held) in enumerate(on_ranks(some_layout, watch, folder, subject.settings(some_layout))):
        for which, extra in held.items():
            assert extra <= BUCKET * total, (
                f"at the {which} tensor of the stream, rank {rank} holds {extra} bytes beside the model: "
                f"{extra / total:.0%} of the {total} that are streamed, where one bucket is {BUCKET:.0%} at most"
            )


def train_and_export(folder: Path, settings: dict[str, Any], target: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """After a step the log-probabilities of a batch, and the weights; the folder is written."""
    first, second, _ = (pack(samples) for samples in mini_batches())
    with TrainingWorker({"path": str(folder)}, settings, OPTIMIZER) as worker:
        worker.initialize()
        worker.train_mini_batch(first, SFTLoss())
        worker.export(target)
        outputs = worker.infer_batch(second).outputs
        assert outputs is not None and outputs.log_probs is not None
        return outputs.log_probs, weights_of(worker)


@clause("checkpoints.md#exports", needs=("export",))
def test_the_folder_loads_in_transformers(
    subject: Subject, some_layout: Layout, on_ranks: OnRanks, model: Model, tmp_path: Path
) -> None:
    """The folder that is written after a step is one that `from_pretrained` loads without a missing, unexpected or
    misshapen tensor, and it says what the engine says.
    """
    from transformers import AutoModelForCausalLM

    folder, target = model(subject.family_at(some_layout)), tmp_path / "export"
    answers = on_ranks(some_layout, train_and_export, folder, subject.settings(some_layout), target)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        target, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    faults = {fault: sorted(map(str, names)) for fault, names in report.items() if names}
    assert not faults, f"transformers says of the folder: {faults}"
    wrong = differences(load_file(target / "model.safetensors"), answers[0][1])
    assert not wrong, f"the folder holds something else than the stream: {'; '.join(wrong)}"
    expected = torch.cat([plain.log_probs(loaded, sample.input_ids) for sample in mini_batches()[1]])
    for rank, (found, _) in enumerate(answers):
        off = (found.cpu() - expected).abs().max().item()
        assert off <= LOG_PROBS, f"log-probabilities of rank {rank} and of the folder are {off:.1e} apart"
