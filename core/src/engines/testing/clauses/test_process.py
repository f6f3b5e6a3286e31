"""An engine leaves its process as it found it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules

from engines.determinism import rng_state
from engines.engine.creating import local_device
from engines.loading import load
from engines.losses import SFTLoss
from engines.registry import registry
from engines.testing.clause import clause
from engines.testing.fixtures import Model
from engines.testing.live import live_groups, opened, share
from engines.testing.samples import mini_batches
from engines.testing.subject import Subject
from engines.testing.world import WorldError, Worlds

SAMPLES = mini_batches()[0][:4]
DETERMINISM: dict[str, Callable[[], Any]] = {
    "algorithms": torch.are_deterministic_algorithms_enabled,
    "warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "cudnn": lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
}
MODES: dict[str, Callable[[], bool]] = {
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "autocast on the CPU": lambda: torch.is_autocast_enabled("cpu"),
}


def state_of_process(device: torch.device) -> dict[str, Any]:
    """What all that runs in a process shares, by the names that a failure uses."""
    return {
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "sys.excepthook": sys.excepthook,
        "signal handlers": {
            one.name: signal.getsignal(one) for one in signal.valid_signals() if hasattr(one, "name")
        },
        "threads": {one.name for one in threading.enumerate() if not one.daemon},
        "the root logger": (logging.root.level, list(logging.root.handlers)),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's modes": {name: read() for name, read in MODES.items()},
        "torch's determinism": {name: read() for name, read in DETERMINISM.items()},
        "torch's number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's precision of matrix products": torch.get_float32_matmul_precision(),
        "hooks on all modules": {name: len(found) for name, found in vars(modules).items() if _holds_hooks(name)},
        "process groups": live_groups(),
        "random states": {name: _plain(value) for name, value in rng_state(device).items()},
    }


def _holds_hooks(name: str) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def live(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """What differs after an engine's life from what was when it was loaded."""
    selection = registry.resolve("language_model", settings["strategy"], settings["device"])
    load(selection)
    device = local_device(selection)
    before = state_of_process(device)
    with opened(folder, settings) as engine:
        batch = share(engine, SAMPLES)
        engine.train_batch(batch, SFTLoss())
        engine.infer_batch(batch)
    after = state_of_process(device)
    return {name: _change(before[name], after[name]) for name in before if before[name] != after[name]}


def _change(before: Any, after: Any) -> str:
    """In words, without what is equal in both."""
    if isinstance(before, dict):
        names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        return ", ".join(_change_of(name, before.get(name), after.get(name)) for name in sorted(names))
    return f"{before!r} became {after!r}"


def _change_of(name: str, before: Any, after: Any) -> str:
    said = f"{name}: {before!r} became {after!r}"
    return said if len(said) < 200 else name


@clause("contract.md#what-an-engine-leaves-behind")
def test_the_process_is_left_as_it_was(subject: Subject, model: Model) -> None:
    """Beyond what its manifest says (`env`, `prepare`), an engine leaves nothing global behind: no environment
    variable, thread, signal handler, hook, mode, default or process group. Nor has it drawn from the process's random
    numbers, of which a model without dropout needs none.
    """
    worlds = Worlds()
    fresh = worlds.get(1, subject.selection, subject.setup)
    try:
        (changes,) = fresh(live, model(subject.families[0]), subject.settings())
    except WorldError as error:
        pytest.fail(str(error), pytrace=False)
    finally:
        worlds.close()
    assert not changes, "\n".join(
        ["an engine that was created, trained, inferred and was closed changed"]
        + [f"{name}: {change}" for name, change in changes.items()]
    )
