"""A checkpoint of any layout becomes, without a run, the Hugging Face folder that an export would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoint.convert import convert
from engines.losses import SFTLoss
from engines.testing.runs import OPTIMIZER, pack
from engines.testing.samples import mini_batches
from engines.worker import TrainingWorker
from support.megatron import LAYOUTS, settings


def train(folder: Path, engine: dict[str, Any], target: Path, model_type: str, dtype: str) -> None:
    model = {"path": str(folder), "dtype": dtype}
    with TrainingWorker(model, engine, OPTIMIZER, model_type=model_type) as worker:
        worker.initialize()
        if model_type == "language_model":
            worker.train_mini_batch(pack(mini_batches()[0]), SFTLoss())
        worker.save_checkpoint(target / "step-1", step=1)
        worker.export(target / "export")


@pytest.mark.parametrize(
    ("family", "layout", "model_type", "dtype"),
    [
        ("qwen3_moe", "tp2 ep2", "language_model", "float32"),
        ("llama_tied", "pp2", "value_model", "bfloat16"),
        pytest.param("mixtral", "tp2 etp2", "language_model", "bfloat16", marks=pytest.mark.more),
        pytest.param("llama", "tp2 sp", "value_model", "float32", marks=pytest.mark.more),
    ],
)
def test_equal_to_the_export_to_the_byte(
    family: str, layout: str, model_type: str, dtype: str, world: Any, deep: Any, tmp_path: Path
) -> None:
    world(LAYOUTS[layout].processes)(train, deep(family), settings(layout), tmp_path, model_type, dtype)
    convert(tmp_path / "step-1", tmp_path / "model", dtype=getattr(torch, dtype))
    assert contents(tmp_path / "model") == contents(tmp_path / "export")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
