"""From a request to a report: every engine at every layout, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.devices import check_known, named_device
from engines.errors import EngineNotFound, LaunchError
from engines.registry import registry
from engines.testing.reference import reference_engine
from engines.testing.world import WorldError, Worlds
from engines.verifying.baseline import Baseline
from engines.verifying.contenders import Contender, find_baseline, find_contenders
from engines.verifying.models import Models, OwnModel, TinyModels
from engines.verifying.numbers import TOLERANCES, compare
from engines.verifying.plan import Run, check_somebody_runs, make_plan
from engines.verifying.progress import Progress
from engines.verifying.ranks import count_devices, make_models
from engines.verifying.request import Request
from engines.verifying.results import Refusal, Report, Row
from engines.verifying.running import Failed, Runner
from engines.versions import deciding_versions

LIMIT_S, LIMIT_TIMES = 120.0, 30.0
"""A run may take this many seconds, or this many times as long as the baseline took, if that is more."""


def verify(request: Request, progress: Progress) -> Report:
    """Run the engines that are asked for, and compare them.

    Raises `EnginesError` for an engine, layout, device or model that isn't there, and where an engine that was named
    refuses all that is asked of it.
    """
    with reference_engine(), TemporaryDirectory(prefix="engines-verify-") as folder:
        scratch = Path(folder)
        contenders, unusable, compared_with = _engines(request)
        with closing(Worlds(logs=scratch)) as worlds:
            models = _models(request.model, compared_with, worlds, scratch)
            plan = make_plan(contenders, request.layouts, models, partial(_devices, worlds))
            check_somebody_runs(contenders, plan.running, [*unusable, *plan.refusals])
            runner = Runner(worlds, scratch, request.steps)
            baseline = Baseline(compared_with, runner)
            results = []
            with progress.of(len(plan.runs)):
                for run in plan.runs:
                    progress.begin(run)
                    results.append(_result(run, runner, baseline))
                    progress.end(results[-1])
    rows = [one for one in results if isinstance(one, Row)]
    refusals = [*unusable, *plan.refusals, *(one for one in results if isinstance(one, Refusal))]
    check_somebody_runs(contenders, {row.engine for row in rows}, refusals)
    versions = _versions([compared_with, *contenders])
    trained = {model: standard.trained for model, standard in baseline.standards.items()}
    return Report(compared_with.name, request.steps, TOLERANCES, rows, refusals, trained, versions)


def _engines(request: Request) -> tuple[Sequence[Contender], Sequence[Refusal], Contender]:
    """The engines to be verified, those that can't be used, and the one that they are compared with."""
    device = request.device or named_device()
    if device is not None:
        check_known(device, registry.devices(), "--device" if request.device else "ENGINES_DEVICE")
    contenders, unusable = find_contenders(request.engines, device)
    if not contenders:
        said = [f"No engine can be verified on {device or 'cpu'}."]
        said += [f"  {one.engine}: {one.reason}" for one in unusable]
        raise EngineNotFound("\n".join(said), None if unusable else "Try: pip install engines-fsdp")
    return contenders, unusable, find_baseline(request.against, device)


def _models(own: Path | None, maker: Contender, worlds: Worlds, scratch: Path) -> Models:
    """The user's, or tiny ones, which are made by the process in which `maker` will run."""
    if own is not None:
        return OwnModel(own)
    return TinyModels(lambda: _ask(worlds, maker, make_models, scratch))


def _devices(worlds: Worlds, engine: Contender) -> int | None:
    """As many as its processes see; the CPU's cores may be shared."""
    kind = engine.selection.device_spec.torch_device
    return None if kind == "cpu" else _ask(worlds, engine, count_devices, kind)


def _ask(worlds: Worlds, engine: Contender, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a process says in which `engine` may run later. Raises `LaunchError` where none can be started."""
    try:
        return worlds.get(1, engine.selection, engine.subject.setup)(function, *arguments)[0]
    except WorldError as error:
        said = f"No process can be started on {engine.selection.device}: {error}"
        raise LaunchError(said, error.last_words or None) from error


def _versions(engines: Sequence[Contender]) -> dict[str, str]:
    found = [deciding_versions(one.selection.distribution) for one in engines]
    return {name: version for versions in found for name, version in versions.items() if version}


def _result(run: Run, runner: Runner, baseline: Baseline) -> Row | Refusal:
    row = Row(run.engine.name, run.layout.name, run.model.name, TOLERANCES)
    began = time.monotonic()
    try:
        standard = baseline.of(run.model)
        row, began = replace(row, tolerance=standard.tolerance), time.monotonic()
        limit = max(LIMIT_S, LIMIT_TIMES * standard.trained.seconds)
        trained, _ = runner.run(run.engine, run.layout, run.model, timeout=limit, expected=standard.folder)
    except Failed as failed:
        if failed.refused:
            return Refusal(row.engine, row.layout, failed.cause)
        return replace(row, seconds=time.monotonic() - began, causes=[failed.cause])
    numbers = compare(trained, standard.trained)
    return replace(row, seconds=trained.seconds, differences=numbers, trained=trained, causes=trained.faults)
