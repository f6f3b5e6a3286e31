"""Gradients that are not finite on one rank alone: all skip alike, and the run says which samples and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import checkpoint
from engines.cli.main import main
from engines.recipes.sft.diagnosis import diagnose
from support.commands import read_jsonl, recipe, run, write_jsonl

POISON = 255
"""A token whose row of the embedding is NaN, so that samples which have it, and no others, have no finite loss."""


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        pytest.param("fsdp2", {}),
        pytest.param("megatron", {"pipeline_parallel_size": 2}, marks=pytest.mark.more),
    ],
)
def test_bad_samples_stop_a_run_that_names_them(work: Path, strategy: str, layout: dict[str, Any]) -> None:
    poison(work / "model" / "model.safetensors")
    good, bad, masked = ({"input_ids": ids} for ids in ([3, 5, 7, 11], [3, POISON, 7], [3, 5]))
    masked["loss_mask"] = [1, 0]
    steps = [
        *([masked] * 3, [good] * 3, [good, bad, good], [good] * 3),
        *([bad, good, good], [good, good, bad], [good, bad, good]),  # on either rank
    ]
    write_jsonl(work / "data.jsonl", [sample for step in steps for sample in step])
    file = recipe(
        work,
        trainer={"steps": 50, "shuffle": False, "max_skipped": 3, "save_every": 1},
        engine={"strategy": strategy, **layout},
        optimizer={"lr": 4e-3, "warmup_steps": 4},
        launch={"nproc": 2},
    )
    code, output = run(file)
    out = work / "out"
    assert code == 1, output
    said = output[output.index("Error") :]
    assert said.startswith(
        "Error: the gradients of 3 steps in a row were not finite (trainer.max_skipped), the last one step 7; step 6"
    )
    assert "not finite for 1 of the 3 samples of that step" in said
    assert f"  {work / 'data.jsonl'}, line 20\n" in said and said.count(", line ") == 1, said
    assert "Gradients that are not finite, of 21 parameters:\n  model.embed_tokens.weight\n  model.layers.0." in said
    assert "Traceback" not in said

    lines = read_jsonl(out / "metrics.jsonl")
    assert [line["skip_reason"] for line in lines] == ["empty", None, "non_finite", None, *["non_finite"] * 3]
    assert [line["lr"] for line in lines] == [1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3, 3e-3], "made steps alone advance it"
    assert (lines[0]["loss"], lines[0]["grad_norm"], lines[0]["targets"]) == (0, 0, 0)
    assert all(line["loss"] is None and line["grad_norm"] is None for line in lines if line["lr"] == 3e-3), "as null"
    assert main(["checkpoint", "verify", str(out)]) == 0
    assert same_weights(out, 2, 3) and not same_weights(out, 3, 4) and same_weights(out, 4, 6), "on every rank"
    last = checkpoint.open(out / "checkpoints" / "step-6")
    assert last.state["run"]["skipped_in_a_row"] == 2
    assert last.state["engine"]["schedule"]["steps_done"] == 2


SOUND, BROKEN = {"a.jsonl, line 1": True}, {"a.jsonl, line 2": False}


def test_the_diagnosis_follows_from_which_samples_are_finite() -> None:
    names = [f"layers.{number}" for number in range(10)]
    assert diagnose(SOUND, []).startswith("The loss of each of its samples is finite, so gradients overflow")
    assert diagnose(BROKEN, []).startswith("No sample of that step has a finite loss, so the weights are at fault")
    assert "for 1 of the 2 samples" in diagnose({**SOUND, **BROKEN}, [])
    assert "line 1" not in diagnose({**SOUND, **BROKEN}, [])
    assert diagnose(SOUND, names).endswith("of 10 parameters:\n  " + "\n  ".join(names[:8]) + "\n  and 2 more")


def poison(file: Path) -> None:
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, file, {"format": "pt"})


def same_weights(out: Path, step: int, other: int) -> bool:
    """Whether each rank's file of weights has the same bytes after both steps."""
    one, two = (sorted((out / "checkpoints" / f"step-{each}").glob("model-*.safetensors")) for each in (step, other))
    assert len(one) == len(two) == 2
    return [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
