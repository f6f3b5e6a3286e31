"""`engines train` on Megatron, as a user runs it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from support.commands import read_jsonl, recipe, run, write_jsonl


@pytest.fixture
def work(tmp_path: Path, deep) -> Path:
    """A folder with a mixture as `model`, and `data.jsonl`."""
    shutil.copytree(deep("qwen3_moe_dense_first"), tmp_path / "model")
    draw = random.Random(0)
    rows = [[draw.randrange(256) for _ in range(draw.randint(2, 40))] for _ in range(13)]
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in rows])
    return tmp_path


@pytest.mark.more
def test_a_run_says_what_it_was_and_goes_on_with_no_other_engine(work):
    engine = {"strategy": "megatron", "expert_parallel_size": 2}
    file = recipe(work, engine=engine, launch={"nproc": 2})
    code, output = run(file)
    assert code == 0, output

    built = json.loads((work / "out" / "run.json").read_text())
    layout = {"expert_parallel_size": 2, "data_parallel_size": 2}
    assert built["layout"] == {**dict.fromkeys(built["layout"], 1), **layout}
    assert built["strategy"] == "megatron" and "megatron-core" in built["distributions"]
    lines = read_jsonl(work / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["moe/load_balancing_loss"] > 0 and line["moe/busiest_expert"] >= 1
        assert sum(f"moe/tokens_per_expert/{expert}" in line for expert in range(8)) == 8

    code, output = run(file, "trainer.steps=8", "engine={strategy: fsdp2, device: cpu}", "launch.nproc=1")
    assert code == 2, output
    assert "megatron" in output and "fsdp2" in output and "Traceback" not in output
