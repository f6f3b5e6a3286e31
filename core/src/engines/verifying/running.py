"""One run after the other in processes that stay: what came of each, or why nothing did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from engines.launch.reports import Death
from engines.launch.reports import Report as RankReport
from engines.testing.layouts import Layout
from engines.testing.world import WorldError, Worlds
from engines.verifying.contenders import Contender
from engines.verifying.models import Model
from engines.verifying.numbers import Trained
from engines.verifying.ranks import Samples, export_rounded, train

LONGEST_MESSAGE = 600
"""Characters of a cause; what C++ has to say can fill pages."""


@dataclass
class Failed(Exception):
    """A run came to nothing."""

    cause: str
    refused: bool = False
    """The engine said, before it began to train, what the user must mend; otherwise something went wrong."""


@dataclass
class Runner:
    """Runs engines in `worlds`, and keeps below `scratch` what they export."""

    worlds: Worlds
    scratch: Path
    steps: int
    _folders: int = 0

    def run(
        self, engine: Contender, layout: Layout, model: Model, *, timeout: float, expected: Path | None = None
    ) -> tuple[Trained, Path]:
        """What was trained, and where it is exported to; what is compared with nothing is kept, for others to be
        compared with it. Raises `Failed`.
        """
        export = self._new_folder() if expected is None else self.scratch / "export"
        rmtree(export, ignore_errors=True)
        samples = Samples(self.steps, model.vocab, model.longest)
        settings = engine.subject.settings(layout)
        ranks = self._on_ranks(engine, layout, timeout, train, model.folder, settings, samples, export, expected)
        return _agreed(ranks), export

    def export_rounded(self, engine: Contender, layout: Layout, model: Model, *, timeout: float) -> Path:
        """A folder with the model's weights, rounded otherwise. Raises `Failed`."""
        folder = self._new_folder()
        settings = engine.subject.settings(layout)
        self._on_ranks(engine, layout, timeout, export_rounded, model.folder, settings, folder)
        return folder

    def _on_ranks(
        self, engine: Contender, layout: Layout, timeout: float, function: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        world = self.worlds.get(layout.processes, engine.selection, engine.subject.setup)
        try:
            return world(function, *arguments, timeout=timeout)
        except WorldError as error:
            raise _failed(error) from error

    def _new_folder(self) -> Path:
        self._folders += 1
        return self.scratch / f"model-{self._folders}"


def _agreed(ranks: Sequence[Trained]) -> Trained:
    """Rank 0's; that others report something else is a fault."""
    first = ranks[0]
    others = [
        rank for rank, one in enumerate(ranks) if (one.losses, one.grad_norms) != (first.losses, first.grad_norms)
    ]
    if not others:
        return first
    who = f"rank {others[0]} reports" if len(others) == 1 else f"ranks {', '.join(map(str, others))} report"
    fault = f"{who} another loss or gradient norm than rank 0; are gradients summed over `ranks.dp_group`?"
    return replace(first, faults=[*first.faults, fault])


def _failed(error: WorldError) -> Failed:
    match error.cause:
        case RankReport(kind="user") as report:
            return Failed("\n".join(filter(None, [report.message, report.remedy])), refused=True)
        case RankReport(kind="stopped") as report:  # it says why, after the name of its class
            said = report.message.partition(": ")[2]
        case RankReport() as report:
            said = f"rank {report.rank}: {report.message}"
        case Death() as death:
            said = f"{death}"
            if error.last_words:
                said = f"{said.removesuffix(' and said nothing')}; its last words: {error.last_words}"
        case None:
            said = f"{error}"
    said = " ".join(said.split())
    return Failed(said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]} ...")
