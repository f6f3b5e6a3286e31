"""On real NPUs: the recipe command against the same recipe on the CPU. Run by `make test-npu` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.devices import BUILT_IN, presence
from engines.testing.tiny import tiny_folder
from support.commands import Command, read_jsonl, recipe, write_jsonl

pytestmark = pytest.mark.npu

TOLERANCE = 1e-3
"""Largest relative difference: float32 products on an NPU round otherwise than on a CPU."""


@pytest.fixture(autouse=True)
def _on_an_npu() -> None:
    found = presence(BUILT_IN["npu"])
    if not found.present:
        pytest.skip(f"needs an NPU: {found.how}")


def losses(folder: Path, name: str, engine: dict[str, Any], processes: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    asked = recipe(folder, engine=engine, launch={"nproc": processes}, trainer={"output_dir": str(folder / name)})
    code, output = Command(asked).finish(600)
    assert code == 0, output
    return [(row["loss"], row["grad_norm"]) for row in read_jsonl(folder / name / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (1, {"strategy": "fsdp2"}),
        (2, {"strategy": "fsdp2"}),
        (4, {"strategy": "fsdp2", "data_parallel_replicate_size": 2}),
        (1, {}),
        (1, {"flash_attention": False}),
        (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_parallel_size": 2}),
        (2, {"context_parallel_size": 2}),
        (2, {"distributed_optimizer": True}),
    ],
    ids=str,
)
def test_trains_as_on_the_cpu(processes: int, more: dict[str, Any], tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama").rename(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": list(range(2, length))} for length in (5, 9, 30, 7, 12, 40)])
    expected = losses(tmp_path, "cpu", {"strategy": "fsdp2", "device": "cpu"}, 1)
    found = losses(tmp_path, "npu", {"strategy": "megatron", "device": "npu", **more}, processes)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
