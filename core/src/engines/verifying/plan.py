"""Which engine is run at which layout, on which model; and what isn't run, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engines.errors import ConfigError
from engines.testing.layouts import Layout
from engines.verifying.contenders import Contender
from engines.verifying.models import Model, Models
from engines.verifying.request import check_layouts
from engines.verifying.results import Refusal, in_words

Devices = Callable[[Contender], int | None]
"""How many devices an engine's processes can have, one each; None: as many as they want."""


@dataclass(frozen=True)
class Run:
    """One run."""

    engine: Contender
    layout: Layout
    model: Model


@dataclass
class Plan:
    """All of them, in order."""

    runs: list[Run] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def running(self) -> set[str]:
        """The names of the engines that run at all."""
        return {run.engine.name for run in self.runs}


def make_plan(contenders: Sequence[Contender], names: Sequence[str] | None, models: Models, devices: Devices) -> Plan:
    """Of every engine all layouts, or those with `names`.

    Raises `ConfigError` for a name that is no layout's.
    """
    declared = {one.name: one.layouts() for one in contenders}
    asked = check_layouts(names or (), [layout for layouts in declared.values() for layout in layouts])
    plan = Plan()
    for one in contenders:
        layouts = declared[one.name] if names is None else asked.values()
        for layout in layouts:
            found = _model_or_reason(one, layout, models, devices)
            if isinstance(found, Model):
                plan.runs.append(Run(one, layout, found))
            else:
                plan.refusals.append(Refusal(one.name, layout.name, found))
    return plan


def _model_or_reason(one: Contender, layout: Layout, models: Models, devices: Devices) -> Model | str:
    lacking = one.lacking(layout)
    if lacking:
        return f"needs {' and '.join(lacking)}, which it doesn't declare"
    there = devices(one)
    if there is not None and layout.processes > there:
        return f"needs {layout.processes} devices of {one.selection.device}, and {there} can be seen"
    return models.choose(one.subject, layout)


def check_somebody_runs(contenders: Sequence[Contender], running: set[str], refusals: Sequence[Refusal]) -> None:
    """Raise `ConfigError` for an engine that was asked for and refuses everything, and if nobody runs at all."""
    idle = [one for one in contenders if one.name not in running]
    if not running or any(one.named for one in idle):
        names = {one.name for one in idle}
        said = [f"  {line}" for line in in_words(one for one in refusals if not running or one.engine in names)]
        raise ConfigError("\n".join([f"{' and '.join(names)} can't do what is asked for:", *said]))
