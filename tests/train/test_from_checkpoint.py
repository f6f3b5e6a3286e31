"""`engines train` with another engine's checkpoint for model.path: its weights, and a start of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.commands import read_jsonl, recipe, run, write_jsonl
from support.tokenizer import tiny_tokenizer

EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "targets")


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in read_jsonl(out / "metrics.jsonl")]


def export(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "export").iterdir())}


@pytest.mark.more
def test_a_run_from_a_checkpoint_is_one_from_its_export(work: Path) -> None:
    tiny_tokenizer(work / "model")
    write_jsonl(work / "data.jsonl", [{"text": f"text number {number}"} for number in range(9)])
    pipeline = {"strategy": "megatron", "pipeline_parallel_size": 2}
    code, output = run(recipe(work, trainer={"steps": 2}, engine=pipeline, launch={"nproc": 2}))
    assert code == 0, output
    assert "weights of checkpoint" not in output
    shutil.rmtree(work / "model")

    checkpoint, ours, theirs = work / "out/checkpoints/step-2", work / "ours", work / "theirs"
    file = recipe(work, trainer={"steps": 2})
    alone = (file, "trainer.save_every=1", "trainer.keep=1", "optimizer.schedule=linear")
    code, output = run(*alone, f"model.path={checkpoint}", f"trainer.output_dir={ours}")
    assert code == 0, output
    origin = f"weights of checkpoint {checkpoint}, step 2 of a run with megatron; optimizer and schedule start afresh"
    assert origin in output
    code, output = run(*alone, f"model.path={work / 'out/export'}", f"trainer.output_dir={theirs}")
    assert code == 0, output
    assert exact(ours) == exact(theirs)
    assert [line["step"] for line in exact(ours)] == [1, 2]
    assert export(ours) == export(theirs)
    assert {"tokenizer.json", "generation_config.json"} <= export(ours).keys()

    goes_on = ("trainer.steps=3", f"model.path={checkpoint}", f"trainer.output_dir={ours}")
    code, output = run(file, "optimizer.schedule=linear", *goes_on)
    assert code == 0, output
    assert f"going on from {ours}/checkpoints/step-2" in output
    assert "weights of checkpoint" not in output
    assert [line["step"] for line in exact(ours)] == [1, 2, 3]
