"""Plugin code run in a process of its own: whatever it does or however it dies, the command lives on."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any, Literal

from engines.choosing import select
from engines.errors import BrokenPlugin, EnginesError
from engines.loading import LoadedEngine, load, load_config_class
from engines.registry import Candidate, Registry
from engines.selection import Selection

Task = Literal["load", "schema"]
TIMEOUT_S = 300.0

# The child searches where its parent does, whatever folder the one or the other was started in.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from engines.cli.probe import child
child(*sys.argv[2:])
"""


def load_error(candidate: Candidate, registry: Registry) -> EnginesError | None:
    """What goes wrong when a fresh process loads the engine and holds its class to the contract; None if nothing."""
    try:
        _ask("load", candidate, registry)
    except EnginesError as error:
        return error
    return None


def settings_schema(candidate: Candidate, registry: Registry) -> Any:
    """JSON Schema of an engine's config class. Raises BrokenPlugin if it cannot be imported."""
    return _ask("schema", candidate, registry)


def _ask(task: Task, candidate: Candidate, registry: Registry) -> Any:
    spec = registry.devices()[candidate.device]
    selection = select(candidate, candidate.model_types[0], spec, "asked for", ())
    with tempfile.TemporaryDirectory(prefix="engines-probe-") as folder:
        question, answer = os.path.join(folder, "question"), os.path.join(folder, "answer")
        with open(question, "wb") as file:
            pickle.dump(selection, file)
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), task, question, answer]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise _broken(selection, f"not loaded within {TIMEOUT_S:.0f} s", "") from None
        if not os.path.exists(answer):
            raise _broken(selection, f"the process that loads it ended with code {ended.returncode}", ended.stderr)
        with open(answer, "rb") as file:
            said = pickle.load(file)
    if isinstance(said, EnginesError):
        raise said
    return said


def _broken(selection: Selection, cause: str, stderr: str) -> BrokenPlugin:
    last = stderr.strip().splitlines()[-1:]
    cause += f" ({last[0].strip()})" if last else ""
    return BrokenPlugin(selection.distribution, selection.plugin, selection.manifest, cause, "tell its author")


def child(task: Task, question: str, answer: str) -> None:
    """The other side: answers a question in the process that was made for it."""
    with open(question, "rb") as file:
        selection: Selection = pickle.load(file)
    said: Any
    try:
        if task == "load":
            _check_class(load(selection))
            said = None
        else:
            said = load_config_class(selection).model_json_schema()
    except EnginesError as error:
        error.__cause__ = None
        said = error
    with open(f"{answer}.part", "wb") as file:
        pickle.dump(said, file)
    os.replace(f"{answer}.part", answer)


def _check_class(loaded: LoadedEngine) -> None:
    """Hold an engine's class to the contract, which takes torch: without it there is none to be trained with."""
    if "torch" in sys.modules:
        from engines.engine.binding import check_engine_class

        selection = loaded.selection
        check_engine_class(loaded.engine_class, selection.capabilities, selection.distribution)
