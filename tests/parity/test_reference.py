"""The reference and its data are fit to judge: independent, precise, and awkward where faults would show."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from engines.testing import plain
from engines.testing.runs import OPTIMIZER
from engines.testing.samples import MASKED, SINGLE, mini_batches
from engines.testing.tiny import REFERENCE_FAMILIES, tiny_model


def test_it_imports_nothing_of_engines():
    imported = set()
    for node in ast.walk(ast.parse(Path(plain.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert not any(name.startswith("engines") or name == "support" for name in imported), imported
    assert importlib.util.find_spec("transformers")


@pytest.mark.parametrize("family", REFERENCE_FAMILIES)
def test_it_is_precise(family, folder, reference_run):
    exact = plain.train(folder(family), mini_batches(), **OPTIMIZER, dtype=torch.float64)
    run = reference_run(family, 8)
    assert run.losses == pytest.approx(exact.losses, rel=2e-7)
    assert run.grad_norms == pytest.approx(exact.grad_norms, rel=4e-7)
    for name, value in exact.weights.items():
        assert (run.weights[name] - value).abs().max() <= 2e-6 * value.abs().max(), name


def test_clipping_is_active(reference_run):
    for family in REFERENCE_FAMILIES:
        assert min(reference_run(family, 8).grad_norms) > 2 * OPTIMIZER["clip_grad"]


def test_the_samples_are_awkward():
    for samples in mini_batches():
        lengths = [len(sample.input_ids) for sample in samples]
        assert min(lengths) <= 3 and max(lengths) > 80
        assert samples[MASKED].num_targets == 0 and samples[SINGLE].num_targets == 1
        assert any(sample.loss_mask[0] for sample in samples), "a first token that is marked must not count"
        shares = sorted(sample.num_targets / len(sample.input_ids) for sample in samples)
        assert shares[-1] > 1.5 * shares[2], "means over ranks must not equal the mean over all"


def test_routers_decide_clearly():
    """Rounding (about 1e-7) must not send a token to another expert."""
    model = tiny_model("qwen3_moe")
    gaps = []

    def watch(gate, inputs, output):
        ranked = torch.nn.functional.linear(inputs[0].flatten(0, -2), gate.weight).sort(-1, descending=True).values
        gaps.append((ranked[:, 1] - ranked[:, 2]).min().item())

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(watch)
    with torch.no_grad():
        for samples in mini_batches():
            for sample in samples:
                model(torch.tensor([sample.input_ids]))
    assert len(gaps) == 2 * 24 and min(gaps) > 1e-5
