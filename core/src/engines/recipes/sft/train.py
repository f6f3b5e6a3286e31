"""`engines train` for `recipe: sft`, up to the start of the ranks. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from engines.checkpoint_folder.manifest import RESUMABLE
from engines.recipes.layering import read_layers
from engines.recipes.sft.config import SFTRecipe
from engines.recipes.sft.loading import build_recipe
from engines.selection import Selection

if TYPE_CHECKING:
    from engines.launch import Job
    from engines.recipes.model_folder import ModelFolder
    from engines.recipes.sft.checks import Checked

TARGET = "engines.recipes.sft.run:run"


def train(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> int:
    """Run a recipe to its end; returns the exit code.

    Starts `launch.nproc` ranks, or takes part as one where another launcher (torchrun) started this process.
    Raises `EnginesError` for what the user must mend, before anything is written.
    """
    from engines.launch import foreign_world, launch, refusals_heard_by_all, run_here

    world = foreign_world()
    with ExitStack() as held:
        with refusals_heard_by_all(world):
            job = _prepare(files, overrides, world, held)
        if job is None:
            return 0
        return launch(job) if world is None else run_here(job, world[0])


def _prepare(
    files: Sequence[str | Path], overrides: Sequence[str], world: tuple[int, int] | None, held: ExitStack
) -> Job | None:
    """Check what can be checked now, say what will run, and hold the output folder; None: nothing is left to do."""
    recipe, selection = build_recipe(read_layers(files, overrides))
    # imported here, since they bring numpy: a mistyped key is answered before that
    from engines.launch import Job
    from engines.recipes.output.folder import OutputFolder
    from engines.recipes.sft.alike import alike
    from engines.recipes.sft.checks import check, check_resumable, model_dir, output_dir

    rank, num_ranks = world or (0, recipe.launch.nproc)
    checked = check(recipe, selection, num_ranks)
    job = Job(
        target=TARGET,
        payload={"recipe": recipe.model_dump(mode="json")},
        num_ranks=num_ranks,
        timeout_s=recipe.launch.timeout_s,
        env=dict(selection.env),
        alike=alike(recipe, selection) if world is not None else {},
    )
    if rank != 0:
        return job
    folder = OutputFolder(output_dir(recipe))
    start = folder.start(recipe.trainer.resume, checked.total_steps)
    if start.finished and world is None:
        print(folder.say_finished(start.step, job.payload["recipe"]))
        return None
    if recipe.trainer.export and not start.finished:
        folder.check_export(model_dir(recipe))
    check_resumable(recipe, selection, start.checkpoint)
    held.enter_context(folder.locked())
    print(_introduction(recipe, selection, checked, num_ranks, world is not None))
    if checked.model.checkpoint is not None and start.checkpoint is None:
        print(_origin(checked.model))
    sys.stdout.flush()
    return job


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
