"""All that a run writes and shows beside checkpoints and export: by its first rank, and by no other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engines.checkpoint import CheckpointStore
from engines.durable import naming
from engines.errors import ConfigError
from engines.launch import RunFailed
from engines.recipes.output.chart import draw_loss
from engines.recipes.output.folder import OutputFolder
from engines.recipes.output.loggers import make_loggers
from engines.recipes.output.metrics import MetricsFile, holds_lines, read_metrics
from engines.recipes.output.progress import make_progress
from engines.recipes.sft.config import SFTRecipe
from engines.recipes.sft.onward import onward


class Writer:
    """The writer of the other ranks: it knows the folder, and does nothing. Use as a context."""

    def __init__(self, folder: OutputFolder) -> None:
        self.folder = folder

    def note(self, text: str) -> None:
        """Show a line."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Write and show a step's line of metrics.jsonl."""

    def sync(self) -> None:
        """Wait until the disk has all lines; before a checkpoint. Raises OSError, also if the file is gone."""

    def retain(self, keep: int | None) -> None:
        """Delete all but the `keep` latest checkpoints; after one. Raises OSError."""

    def finish(self, step: int) -> None:
        """The run is complete, its export written."""

    def stopped(self, step: int) -> None:
        """The run was asked to stop after `step`, and has saved what it shall."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close everything."""


class FirstWriter(Writer):
    """The writer of the first rank."""

    def __init__(
        self, recipe: SFTRecipe, folder: OutputFolder, built: Mapping[str, Any], *, steps_done: int, total_steps: int
    ) -> None:
        """Begin to write: the resolved recipe, run.json, and metrics.jsonl cut back to `steps_done`.

        `built`: what `TrainingWorker.describe` says.
        """
        super().__init__(folder)
        self._trainer = recipe.trainer
        resolved = recipe.model_dump(mode="json")
        self._run = {**built, "steps": total_steps, "finished": False}
        with self._writing(folder.recipe):
            folder.write_recipe(resolved)
        with self._writing(folder.run):
            folder.write_run(self._run)
        with self._writing(folder.metrics):
            aside = folder.set_metrics_aside() if not steps_done and holds_lines(folder.metrics) else None
            self._metrics = MetricsFile(folder.metrics, steps_done=steps_done)
        with self._writing(folder.path):
            self._loggers = make_loggers(recipe.trainer.loggers, folder.path, steps_done=steps_done, recipe=resolved)
        self._progress = make_progress(total_steps, steps_done)
        self._title = f"{folder.path.name}: {built['strategy']} on {built['device']}, {built['world_size']} ranks"
        self._drawn = False
        if aside is not None:
            found = f"{folder.path} holds metrics of a run, but no checkpoint"
            self.note(f"{found}: starting afresh; its metrics are now {aside.name}")

    def note(self, text: str) -> None:
        """Show a line."""
        self._progress.note(text)

    def step(self, line: Mapping[str, Any]) -> None:
        """Write and show a step's line of metrics.jsonl. Raises `ConfigError` where it can't be written."""
        with self._writing(self.folder.metrics):
            self._metrics.append(line)
        figures = {name: value for name, value in line.items() if _is_figure(value) and name != "step"}
        with self._writing(self.folder.path):
            for logger in self._loggers:
                logger.log(line["step"], figures)
        self._progress.step(line["step"], line)

    def sync(self) -> None:
        """Wait until the disk has all lines; before a checkpoint."""
        with naming(self.folder.metrics):
            self._metrics.sync()

    def retain(self, keep: int | None) -> None:
        """Delete all but the `keep` latest checkpoints; after one."""
        if keep is not None:
            CheckpointStore(self.folder.checkpoints).retain(keep)

    def finish(self, step: int) -> None:
        """The run is complete, its export written."""
        self._draw()
        with self._writing(self.folder.run):
            self.folder.write_run({**self._run, "finished": True})
        self.note(f"finished after {step} steps: {self.folder.path}")

    def stopped(self, step: int) -> None:
        """The run was asked to stop after `step`."""
        self.note(f"stopped after step {step}; {', and '.join(onward(self.folder, self._trainer))}")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Draw the curve as far as it goes, and close everything; hurry where a fault waits to be reported."""
        self._progress.close()
        if kind is not None and kind is not RunFailed:
            with suppress(OSError):  # what is wrong is being said
                self._metrics.close()
            return
        with self._writing(self.folder.metrics):
            self._metrics.close()
        with self._writing(self.folder.path):
            for logger in self._loggers:
                logger.close()
        if not self._drawn:
            self._draw()

    def _draw(self) -> None:
        with self._writing(self.folder.chart):
            draw_loss(read_metrics(self.folder.metrics), self.folder.chart, title=self._title)
        self._drawn = True

    @contextmanager
    def _writing(self, file: Path) -> Iterator[None]:
        """What the disk refuses is the user's to mend; other ranks learn of it as this one ends."""
        try:
            yield
        except OSError as error:
            kept, command = onward(self.folder, self._trainer)
            raise ConfigError(
                f"trainer.output_dir: {file} can't be written: {error.strerror or error}; {kept}",
                f"Mend it, and {command}.",
            ) from error


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
