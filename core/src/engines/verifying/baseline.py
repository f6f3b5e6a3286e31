"""The runs that all others are compared with: one a model, made when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engines.errors import ModelError
from engines.testing.layouts import Layout
from engines.verifying.contenders import Contender
from engines.verifying.models import Model
from engines.verifying.numbers import Numbers, Trained, compare, raised
from engines.verifying.running import Failed, Runner

LIMIT_S = 3600.0
"""Nobody knows how long a model takes."""


@dataclass(frozen=True)
class Standard:
    """What the runs of a model are held to."""

    trained: Trained
    folder: Path
    """With the weights after the last step."""
    tolerance: Numbers


class Baseline:
    """An engine's runs, in one process if it has such a layout."""

    def __init__(self, engine: Contender, runner: Runner) -> None:
        self.engine = engine
        self.standards: dict[str, Standard] = {}
        """By model."""
        self._runner = runner
        self._failures: dict[str, Failed] = {}

    def of(self, model: Model) -> Standard:
        """What it trained, and how far from that others may be.

        Raises `ModelError` if it refuses the model, and `Failed`, for every run of the model, if it came to nothing.
        """
        if model.name in self._failures:
            raise self._failures[model.name]
        if model.name not in self.standards:
            try:
                self.standards[model.name] = self._make(model)
            except Failed as failed:
                if failed.refused:
                    raise self._refusal(model, failed.cause) from failed
                self._failures[model.name] = Failed(f"{self._called()}, failed: {failed.cause}")
                raise self._failures[model.name] from failed
        return self.standards[model.name]

    def _make(self, model: Model) -> Standard:
        layout = self._layout(model)
        trained, folder = self._runner.run(self.engine, layout, model, timeout=LIMIT_S)
        if trained.faults:
            raise Failed("; ".join(trained.faults))
        rounded = replace(model, folder=self._runner.export_rounded(self.engine, layout, model, timeout=LIMIT_S))
        again, _ = self._runner.run(self.engine, layout, rounded, timeout=LIMIT_S, expected=folder)
        return Standard(trained, folder, raised(compare(again, trained)))

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
