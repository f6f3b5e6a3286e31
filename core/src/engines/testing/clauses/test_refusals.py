"""What an engine does not declare is refused by name, before anything runs; so is a setting that nobody knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
from engines.contract import ExportPlan
from engines.engine import Engine
from engines.errors import EnginesError
from engines.losses import SFTLoss
from engines.testing import checking
from engines.testing.asking import settings_that_need
from engines.testing.clause import clause
from engines.testing.fixtures import Model, OnRanks
from engines.testing.layouts import SINGLE, Layout
from engines.testing.live import opened, share
from engines.testing.runs import OPTIMIZER
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.worker import TrainingWorker

SAMPLES = mini_batches()[0]
TWO = Layout("two processes", processes=2)
REMEDIES = ("Use ", "engines list --can", "engines that have it", "no installed engine has it")
"""Of which a refusal has one at least."""

Refusal = tuple[str, str, str]
"""What was asked, the type of the error that it met (empty: none), and its message."""


class Entropic(SFTLoss):
    """Reads entropy."""

    needs = frozenset({"log_probs", "entropy"})


def disable_adapter(engine: Engine) -> None:
    with engine.disable_adapter():
        pass


CALLS: dict[str, dict[str, Callable[[Engine], Any]]] = {
    "entropy": {
        "infer_batch(needs={'entropy'})": lambda engine: engine.infer_batch(
            share(engine, SAMPLES), needs={"entropy"}
        ),
        "train_batch with a loss that reads entropy": lambda engine: engine.train_batch(
            share(engine, SAMPLES), Entropic()
        ),
    },
    "export": {"get_per_tensor_param()": lambda engine: engine.get_per_tensor_param()},
    "offload": {"to('cpu')": lambda engine: engine.to("cpu")},
    "lora": {
        "disable_adapter()": disable_adapter,
        "get_per_tensor_param(ExportPlan(adapters='only'))": lambda engine: engine.get_per_tensor_param(
            ExportPlan(adapters="only")
        ),
    },
}
"""Of a live engine, by the capability that they need."""


def ask(folder: Path, settings: dict[str, Any], capability: str, refused: dict[str, Any]) -> list[Refusal]:
    """All that needs `capability`, each asked of this engine: settings that it must refuse, and calls."""
    model = {"path": str(folder)}
    found = [meet(f"engine.{name}", create, model, {**settings, name: value}) for name, value in refused.items()]
    if capability == "bfloat16":
        found.append(meet("model.dtype", create, {**model, "dtype": "bfloat16"}, settings))
    if capability == "deterministic":
        found.append(meet("full determinism", repeat, model, settings))
    if capability in CALLS:
        with opened(folder, settings) as engine:
            found += [meet(what, call, engine) for what, call in CALLS[capability].items()]
    return found


def ask_for_two(folder: Path, settings: dict[str, Any]) -> list[Refusal]:
    """One more process than an engine has that isn't data-parallel."""
    return [meet("a second process", create, {"path": str(folder)}, settings)]


def create(model: dict[str, Any], settings: dict[str, Any]) -> None:
    engines.create(model, settings, OPTIMIZER).close()


def repeat(model: dict[str, Any], settings: dict[str, Any]) -> None:
    TrainingWorker(model, settings, OPTIMIZER, deterministic=True).close()


def meet(what: str, call: Callable[..., Any], *arguments: Any) -> Refusal:
    try:
        call(*arguments)
    except EnginesError as refusal:
        return what, type(refusal).__name__, str(refusal)
    return what, "", ""


@clause("contract.md#what-is-refused-before-anything-starts")
def test_what_is_not_declared_is_refused(undeclared: str, subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """A setting or a call that needs a capability which the manifest doesn't declare raises `CapabilityError` before
    anything runs, and names the capability, the engine and a way out; it is never ignored. More processes than a
    replica has may also be refused by `EngineConfig.check`.
    """
    folder, settings = model(subject.families[0]), subject.settings()
    refused = settings_that_need(undeclared, subject.config)
    if undeclared == "data_parallel":
        refusals = on_ranks(TWO, ask_for_two, folder, settings)[0]
    else:
        refusals = on_ranks(SINGLE, ask, folder, settings, undeclared, refused)[0]
    for what, error, message in refusals:
        assert error, f"{what} is accepted, though {subject.name} doesn't declare {undeclared}"
        if undeclared == "data_parallel" and error in ("ConfigError", "LaunchError"):
            continue
        assert error == "CapabilityError", f"{what} meets {error} instead of CapabilityError: {message}"
        names = [undeclared, subject.selection.backend, *([what] if what.startswith(("engine.", "model.")) else [])]
        silent = [name for name in names if name not in message]
        assert not silent, f"the refusal of {what} doesn't name {' and '.join(silent)}: {message}"
        assert any(remedy in message for remedy in REMEDIES), f"the refusal of {what} names no way out: {message}"
    assert len(refusals) >= len(refused), f"nothing asked for {undeclared}"


def misspell(folder: Path, settings: dict[str, Any]) -> Refusal:
    return meet("engine.micro_batch_siz", create, {"path": str(folder)}, {**settings, "micro_batch_siz": 1})


@clause("engines.config:Config")
def test_an_unknown_setting_is_refused(subject: Subject, on_ranks: OnRanks, model: Model) -> None:
    """A key that the engine's config class doesn't know raises `ConfigError` with the closest one: a misspelt setting
    is never ignored.
    """
    ((what, error, message),) = on_ranks(SINGLE, misspell, model(subject.families[0]), subject.settings())
    assert error, f"{what} is accepted: {subject.config.__name__} must keep `extra='forbid'`"
    assert error == "ConfigError", f"{what} meets {error} instead of ConfigError: {message}"
    assert 'Did you mean "micro_batch_size"' in message, (
        f"the refusal of {what} names no setting close to it: {message}"
    )


@clause("engines.config:Config")
def test_every_setting_is_described(subject: Subject) -> None:
    """Each field of the engine's config class says what it is, in a docstring below it: `engines schema` and the
    documentation show nothing else.
    """
    silent = [name for name, info in subject.config.model_fields.items() if not (info.description or "").strip()]
    where = f"{subject.config.__module__}.{subject.config.__name__}"
    assert not silent, f"{where} says nothing about {', '.join(silent)}"


@clause("engines.config:EngineConfig.check")
def test_settings_are_checked_without_torch(subject: Subject, model: Model, tmp_path: Path) -> None:
    """Settings are validated, and checked against a model of which there is only the config.json, before torch is
    imported; checking them changes nothing, and says the same twice.
    """
    (tmp_path / "config.json").write_bytes((model(subject.families[0]) / "config.json").read_bytes())
    chosen = subject.settings()
    arguments = [chosen["strategy"], chosen["device"], subject.setup or "", str(tmp_path)]
    command = [sys.executable, "-m", checking.__name__, *arguments]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # where what `setup` names may have been found
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, f"checking settings in a fresh interpreter fails:\n{done.stderr}"
    found = json.loads(done.stdout)
    where = f"{subject.config.__module__}.{subject.config.__name__}"
    assert not found["imported"], f"{where}, or its check, imports {', '.join(found['imported'])}"
    assert not found["changed"], f"{where}.check changes {', '.join(found['changed'])}"
    first, second = found["said"]
    assert first == second, f"{where}.check says {first!r}, and the second time {second!r}"
    assert not first, f"{where}.check refuses a model that it took before: {first}"
