"""One run after the other in processes that stay: what came of each, or why nothing did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree

from engines.launch.reports import Death
from engines.launch.reports import Report as RankReport
from engines.testing.layouts import Layout
from engines.testing.world import WorldError, Worlds
from engines.verifying.contenders import Contender
from engines.verifying.models import Model
from engines.verifying.numbers import Trained
from engines.verifying.ranks import Samples, train

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
    _kept: list[Path] = field(default_factory=list)

    def run(
        self, engine: Contender, layout: Layout, model: Model, *, timeout: float, expected: Path | None = None
    ) -> tuple[Trained, Path]:
        """What was trained, and where it is exported to, until the next run if it is compared with `expected`.

        Raises `Failed`.
        """
        export = self.scratch / (f"baseline-{len(self._kept)}" if expected is None else "export")
        if expected is None:
            self._kept.append(export)
        rmtree(export, ignore_errors=True)
        samples = Samples(self.steps, model.vocab, model.longest)
        settings = engine.subject.settings(layout)
        world = self.worlds.get(layout.processes, engine.selection, engine.subject.setup)
        try:
            ranks = world(train, model.folder, settings, samples, export, expected, timeout=timeout)
        except WorldError as error:
            raise _failed(error) from error
        return _agreed(ranks), export


def _agreed(ranks: Sequence[Trained]) -> Trained:
    """Rank 0's; that others report something else is a fault."""
    first = ranks[0]
    others = [
        rank for rank, one in enumerate(ranks) if (one.losses, one.grad_norms) != (first.losses, first.grad_norms)
    ]
    if not others:
        return first
    fault = f"ranks {', '.join(map(str, others))} report another loss or gradient norm than rank 0"
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
            said = f"{death}" + (f" after its last words: {error.last_words}" if error.last_words else "")
        case None:
            said = f"{error}"
    said = " ".join(said.split())
    return Failed(said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]} ...")
