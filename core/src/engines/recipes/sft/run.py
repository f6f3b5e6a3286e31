"""One rank of a fine-tuning run: `run` is what the launcher calls, everywhere alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.agreement import Peers
from engines.checkpoint import CheckpointStore
from engines.launch import Rank
from engines.recipes.data import Samples, read_samples
from engines.recipes.data.tokenizing import tokenize_with_folder
from engines.recipes.model_folder import inspect_model
from engines.recipes.output.folder import OutputFolder
from engines.recipes.output.starting import Start
from engines.recipes.sft.checks import data_limits, model_dir, named, output_dir, total_steps
from engines.recipes.sft.config import SFTRecipe
from engines.recipes.sft.loading import MODEL_TYPE, build_recipe
from engines.recipes.sft.loop import TrainingLoop
from engines.recipes.sft.writer import FirstWriter, Writer
from engines.tracing import ChromeTracer
from engines.worker import TrainingWorker


def run(payload: Mapping[str, Any], rank: Rank) -> int:
    """Train as the recipe in `payload` says; returns the exit code, equal on all ranks.

    Nothing is written to the output folder before data, model and checkpoint are loaded on all ranks.
    """
    recipe, _ = build_recipe(payload["recipe"])
    rank.at("reading the data")
    data = _read_data(recipe)
    steps = total_steps(recipe.trainer, len(data.train))
    worker = TrainingWorker(
        recipe.model,
        recipe.engine,
        recipe.optimizer,
        model_type=MODEL_TYPE,
        total_steps=steps,
        seed=recipe.trainer.seed,
        deterministic=recipe.trainer.deterministic,
        process_timeout_s=recipe.launch.timeout_s,
    )
    rank.meet()
    folder, peers = OutputFolder(output_dir(recipe)), Peers.of()
    start, notes = peers.broadcast(_find_start(recipe, payload["recipe"], folder, steps) if peers.is_first else None)
    if start.finished:
        if rank.is_first:
            print(folder.say_finished(start.step, payload["recipe"]))
        worker.close()
        return 0
    rank.at("loading the model")
    worker.initialize()
    loop = TrainingLoop(recipe, worker, data.train, data.eval, rank, total_steps=steps, start=start)
    built = worker.describe()
    writer = Writer(folder)
    if rank.is_first:
        writer = FirstWriter(recipe, folder, built, steps_done=start.step, total_steps=steps)
    for note in notes:
        writer.note(note)
    if recipe.trainer.trace:
        worker.engine.wrap(ChromeTracer(folder.trace / f"rank-{rank.rank}.json", rank=rank.rank))
    code = loop.run(writer)
    worker.close()
    return code


@dataclass(frozen=True)
class _Data:
    train: Samples
    eval: Samples | None


def _read_data(recipe: SFTRecipe) -> _Data:
    model = inspect_model(model_dir(recipe), MODEL_TYPE)
    limits = data_limits(recipe, model.vocab_size)
    tokenize = tokenize_with_folder(model.path)

    def read(key: str, file: str) -> Samples:
        with named(f"data.{key}"):
            return read_samples(Path(file).expanduser(), limits, tokenize)

    train = read("train", recipe.data.train)
    return _Data(train, read("eval", recipe.data.eval) if recipe.data.eval is not None else None)


def _find_start(
    recipe: SFTRecipe, resolved: Mapping[str, Any], folder: OutputFolder, steps: int
) -> tuple[Start, list[str]]:
    """Where to begin, and what was found on the way. The first rank alone, which holds the folder's lock."""
    start = folder.start(recipe.trainer.resume, steps)
    if start.finished:
        return start, []
    notes = CheckpointStore(folder.checkpoints).clean_up()
    start = folder.start(recipe.trainer.resume, steps)
    if start.checkpoint is not None:
        notes.append(folder.say_onward(start.checkpoint, resolved))
    return start, notes
