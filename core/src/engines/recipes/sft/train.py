"""`engines train` for `recipe: sft`, up to the start of the ranks. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.checkpoint_folder.manifest import RESUMABLE
from engines.recipes.layering import read_layers
from engines.recipes.sft.config import SFTRecipe
from engines.recipes.sft.loading import build_recipe
from engines.selection import Selection

if TYPE_CHECKING:
    from engines.recipes.model_folder import ModelFolder
    from engines.recipes.sft.checks import Checked

TARGET = "engines.recipes.sft.run:run"


def train(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> int:
    """Run a recipe to its end; returns the exit code.

    Starts `launch.nproc` ranks, or takes part as one where another launcher (torchrun) started this process.
    Raises `EnginesError` for what the user must mend, before anything is written.
    """
    recipe, selection = build_recipe(read_layers(files, overrides))
    return _run(recipe, selection)


def _run(recipe: SFTRecipe, selection: Selection) -> int:
    # imported here, since they bring numpy: a mistyped key is answered before that
    from engines.launch import Job, foreign_world, launch, run_here
    from engines.recipes.output.folder import OutputFolder
    from engines.recipes.sft.checks import check, check_resumable, output_dir

    world = foreign_world()
    rank, num_ranks = world or (0, recipe.launch.nproc)
    checked = check(recipe, selection, num_ranks)
    job = Job(
        target=TARGET,
        payload={"recipe": recipe.model_dump(mode="json")},
        num_ranks=num_ranks,
        timeout_s=recipe.launch.timeout_s,
        env=dict(selection.env),
    )
    if rank != 0:
        return run_here(job, rank)
    folder = OutputFolder(output_dir(recipe))
    start = folder.start(recipe.trainer.resume, checked.total_steps)
    if start.finished and world is None:
        print(folder.say_finished(start.step, job.payload["recipe"]))
        return 0
    check_resumable(recipe, selection, start.checkpoint)
    with folder.locked():
        print(_introduction(recipe, selection, checked, num_ranks, world is not None))
        if checked.model.checkpoint is not None and start.checkpoint is None:
            print(_origin(checked.model))
        sys.stdout.flush()
        return launch(job) if world is None else run_here(job, rank)


def _introduction(recipe: SFTRecipe, selection: Selection, checked: Checked, num_ranks: int, foreign: bool) -> str:
    from engines.launch.threads import describe_threads

    lines = [selection.explain(), describe_threads(num_ranks)]
    if foreign and "nproc" in recipe.launch.model_fields_set and recipe.launch.nproc != num_ranks:
        lines.append(f"started by another launcher with {num_ranks} processes; launch.nproc is not used")
    lines.append(
        f"{recipe.data.train}: {checked.num_samples} samples; {checked.total_steps} steps,"
        f" {recipe.trainer.mini_batch_size} samples each"
    )
    contents = recipe.trainer.checkpoint_contents
    if not set(RESUMABLE) <= set(contents):
        lines.append(f"checkpoints hold {', '.join(contents)} alone: a run that is stopped can't go on from them")
    return "\n".join(lines)


def _origin(model: ModelFolder) -> str:
    assert model.checkpoint is not None
    saved = model.checkpoint
    return (
        f"weights of checkpoint {model.path}, step {saved.step} of a run with {saved.backend};"
        " optimizer and schedule start afresh"
    )
