"""`engines train` on simulated NPUs, as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.testing.runs import METRICS
from simulated_npu.installing import PYTHONPATH
from support.commands import read_jsonl, recipe, run


def train(work: Path, device: str) -> list[dict[str, Any]]:
    out = work / device
    file = recipe(
        work,
        engine={"device": device},
        trainer={"save_every": 2, "async_save": True, "output_dir": str(out)},
        launch={"nproc": 2, "timeout_s": 100},
    )
    code, output = run(file)
    assert code == 0, output
    assert f"fsdp2 on {device}" in output
    assert (out / "export/model.safetensors").exists()
    return read_jsonl(out / "metrics.jsonl")


@pytest.mark.more
def test_a_recipe_runs_on_npus(work: Path, simulated_npu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(work, "cpu")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("ENGINES_DEVICE", "npu")
    found = train(work, "npu")
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=METRICS)
    assert all(line["peak_memory_bytes"] > 1000 for line in found)
    assert not any("peak_memory_bytes" in line for line in expected)


@pytest.mark.more
def test_more_processes_than_visible_npus(work: Path, simulated_npu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("ENGINES_DEVICE", "npu")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    code, output = run(recipe(work, engine={"device": "npu"}, launch={"nproc": 2}))
    assert code == 2
    assert "2 processes need a npu device each, and 1 can be seen here" in output
