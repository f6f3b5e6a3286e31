"""The runs that all others are compared with: one a model, made when it is first asked for."""

from __future__ import annotations

from pathlib import Path

from engines.errors import ModelError
from engines.testing.layouts import Layout
from engines.verifying.contenders import Contender
from engines.verifying.models import Model
from engines.verifying.numbers import Trained
from engines.verifying.running import Failed, Runner

LIMIT_S = 3600.0
"""Nobody knows how long a model takes."""


class Baseline:
    """An engine's runs, in one process if it has such a layout."""

    def __init__(self, engine: Contender, runner: Runner) -> None:
        self.engine = engine
        self.trained: dict[str, Trained] = {}
        """By model."""
        self._runner = runner
        self._found: dict[str, Path | Failed] = {}

    def of(self, model: Model) -> tuple[Trained, Path]:
        """What it trained, and the folder with its weights.

        Raises `ModelError` if it refuses the model, and `Failed`, for every run of the model, if it came to nothing.
        """
        if model.name not in self._found:
            self._found[model.name] = self._run(model)
        found = self._found[model.name]
        if isinstance(found, Failed):
            raise found
        return self.trained[model.name], found

    def _run(self, model: Model) -> Path | Failed:
        try:
            trained, folder = self._runner.run(self.engine, self._layout(model), model, timeout=LIMIT_S)
        except Failed as failed:
            if failed.refused:
                raise self._refusal(model, failed.cause) from failed
            return Failed(f"{self._called()}, failed: {failed.cause}")
        if trained.faults:
            return Failed(f"{self._called()}, is of no use: {'; '.join(trained.faults)}")
        self.trained[model.name] = trained
        return folder

    def _layout(self, model: Model) -> Layout:
        """The first that it takes; layouts are in the order of their processes."""
        refusals = []
        for layout in self.engine.layouts():
            refusal = self.engine.subject.refuses(model.folder, layout)
            if refusal is None:
                return layout
            refusals.append(refusal)
        raise self._refusal(model, refusals[0])

    def _refusal(self, model: Model, reason: str) -> ModelError:
        said = f"{self._called()}, can't train {model.name}: {reason}"
        return ModelError(said, "Compare with another one: --against ENGINE.")

    def _called(self) -> str:
        return f"{self.engine.name}, which the others are compared with"
