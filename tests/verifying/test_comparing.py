"""What counts as a difference, and how it is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engines.verifying.numbers import LOOSEST, TOLERANCES, Numbers, Trained, compare, raised
from engines.verifying.results import Report, Row
from engines.verifying.weights import compare_weights, difference, round_otherwise

WEIGHTS = {"a": torch.tensor([[1.0, -4.0], [0.5, 2.0]]), "b": torch.tensor([3.0]), "ids": torch.tensor([7])}
RUN = Trained([2.0, 1.0], [4.0, 0.5], 0.0, 0.0, [], 1.0)


def saved(folder: Path, weights: dict[str, Tensor]) -> Path:
    """In two files."""
    folder.mkdir()
    for number, name in enumerate(weights):
        save_file({name: weights[name]}, folder / f"model-{number}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("found", "expected", "off"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [2.0, -8.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-9], [0.0, 0.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_a_tensors_difference_is_relative_to_its_largest_value(found, expected, off) -> None:
    assert difference(torch.tensor(found), torch.tensor(expected)) == off


def test_other_dtypes_and_integers_are_equal_or_not() -> None:
    assert difference(torch.tensor([1]), torch.tensor([1])) == 0.0
    assert difference(torch.tensor([1]), torch.tensor([2])) == math.inf
    assert difference(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16)) == math.inf


def test_weights_are_compared_as_sent_and_as_exported(tmp_path: Path) -> None:
    expected = saved(tmp_path / "expected", WEIGHTS)
    sent = {**WEIGHTS, "b": torch.tensor([3.003])}
    written = {**sent, "a": WEIGHTS["a"] * 1.01}
    weights, exported, faults = compare_weights(sent.items(), saved(tmp_path / "exported", written), expected)
    assert weights == pytest.approx(1e-3, rel=1e-3)
    assert exported == pytest.approx(1e-2, rel=1e-3)
    assert faults == ["the export doesn't hold the bits that get_per_tensor_param() sends of a"]


def test_names_and_shapes_are_faults(tmp_path: Path) -> None:
    expected = saved(tmp_path / "expected", WEIGHTS)
    sent = {"a": WEIGHTS["a"].T.contiguous()[:1], "ids": WEIGHTS["ids"], "c": WEIGHTS["b"]}
    weights, exported, faults = compare_weights(sent.items(), saved(tmp_path / "exported", WEIGHTS), expected)
    assert (weights, exported) == (math.inf, 0.0)
    assert faults == [
        "get_per_tensor_param() sends no b",
        "get_per_tensor_param() sends also c",
        "get_per_tensor_param() sends a float32[1, 2] instead of float32[2, 2]",
        "the export doesn't hold the bits that get_per_tensor_param() sends of a",
    ]


def test_the_worst_step_counts() -> None:
    off = replace(RUN, losses=[2.0, 1.25], grad_norms=[2.0, 0.5], weights=0.1, exported=0.2)
    assert compare(off, RUN) == Numbers(loss=0.25, grad_norm=0.5, weights=0.1, exported=0.2)
    assert compare(replace(RUN, losses=[2.0, math.nan]), RUN).loss == math.inf


def test_rounding_raises_tolerances_within_limits() -> None:
    assert raised(Numbers(1e-8, 1e-8, 1e-8, 1e-8)) == TOLERANCES
    found = raised(Numbers(1e-5, 1e-8, math.inf, 1.0))
    assert found == Numbers(pytest.approx(1e-4), TOLERANCES.grad_norm, LOOSEST, LOOSEST)


def test_rounding_otherwise_moves_numbers_by_a_bit(tmp_path: Path) -> None:
    draw = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    folder, other = (saved(tmp_path / name, {"a": draw, "ids": torch.arange(3)}) for name in ("one", "other"))
    round_otherwise(folder, seed=1)
    weights, _, faults = compare_weights([("a", draw), ("ids", torch.arange(3))], other, folder)
    assert 0 < weights < 2**-22 and not faults


def test_what_is_no_number_fails_and_is_null() -> None:
    row = Row("mine", "single", "tiny", TOLERANCES, 1.0, Numbers(math.inf, 0.0, 0.0, 0.0), RUN)
    report = Report("reference", 2, TOLERANCES, [row], [], {"tiny": RUN}, {})
    told = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert not report.passed
    assert told["results"][0]["loss"] is None and told["results"][0]["passed"] is False


def test_nothing_that_ran_is_nothing_that_passed() -> None:
    assert not Report("reference", 2, TOLERANCES, [], [], {}, {}).passed
