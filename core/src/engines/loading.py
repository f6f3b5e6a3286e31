"""Loading of a selected engine: the only place where a plugin's code is first run.

In this order: is the engine allowed beside those already loaded; do the modules that its `prepare` must precede wait;
does its environment agree; then the environment is set, `prepare` runs (once in a process), and its modules are
imported. What fails on the way is a BrokenPlugin with the distribution, the file and the cause; what its user must
mend (an EnginesError raised by `prepare`) passes through unchanged.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from engines.errors import BrokenPlugin, EnginesError, LaunchError
from engines.process import here, imported_too_early
from engines.selection import Selection


@dataclass(frozen=True)
class LoadedEngine:
    """An engine's classes, imported and ready to be bound."""

    engine_class: type
    config_class: type[Any]
    selection: Selection


def load(selection: Selection) -> LoadedEngine:
    """Import the engine that was selected. Every process that runs the engine calls this, before it imports anything
    that the engine's manifest names in `before`.

    Raises LaunchError if this process does not allow the engine, BrokenPlugin if its code cannot be imported.
    """
    _check_company(selection)
    _check_order(selection)
    _check_environment(selection)
    _set_environment(selection)
    here.loaded[selection.owner] = selection.process
    _prepare(selection)
    config_class = load_config_class(selection)
    return LoadedEngine(_class_of(selection, "engine", selection.engine), config_class, selection)


def load_config_class(selection: Selection) -> type[Any]:
    """The engine's settings alone, to validate a recipe before torch is imported. Prepares and marks nothing."""
    return _class_of(selection, "config", selection.config)


def _check_company(selection: Selection) -> None:
    for owner, process in here.loaded.items():
        if owner != selection.owner and "exclusive" in (process, selection.process):
            alone = selection.owner if selection.process == "exclusive" else owner
            raise LaunchError(
                f"{selection.owner} cannot be loaded beside {owner}, which this process has loaded: "
                f"{alone} must have its process to itself.",
                "Place them in separate processes.",
            )


def _check_order(selection: Selection) -> None:
    early = imported_too_early(selection.before, selection.prepare)
    if early is not None:
        raise LaunchError(
            f"{selection.owner} must be loaded first, but {early}: what it prepares would be half done.",
            "Load the engine before anything imports that, in a fresh process.",
        )


def _check_environment(selection: Selection) -> None:
    for name, value in selection.env.items():
        if name in here.environment and here.environment[name][0] != value:
            other, owner = here.environment[name]
            raise LaunchError(
                f"{selection.owner} needs {name}={value}, but {owner}, loaded in this process, needs {name}={other}.",
                "Place them in separate processes.",
            )
        found = os.environ.get(name)
        if found is not None and found != value:
            raise LaunchError(
                f"{selection.owner} needs {name}={value}, but this process was started with {name}={found}.",
                f"Unset {name}, or set it to {value}.",
            )


def _set_environment(selection: Selection) -> None:
    for name, value in selection.env.items():
        os.environ[name] = value
        here.environment.setdefault(name, (value, selection.owner))


def _prepare(selection: Selection) -> None:
    prepare = selection.prepare
    if prepare is None:
        return
    if prepare in here.prepared:
        earlier = here.prepared[prepare]
        if earlier is not None:
            raise LaunchError(
                f"Preparing {selection.owner} has already failed in this process ({_said(earlier)}); "
                "what it did until then cannot be undone.",
                "Mend the cause and start a fresh process.",
            ) from earlier
        return
    function = _attribute(selection, "prepare", prepare) if isinstance(prepare, str) else prepare
    try:
        function()
    except BaseException as error:
        here.prepared[prepare] = error
        if isinstance(error, EnginesError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _broken(selection, f"prepare raised {_said(error)}", error) from error
    here.prepared[prepare] = None


def _class_of(selection: Selection, what: str, named: str | type) -> type[Any]:
    found = _attribute(selection, what, named) if isinstance(named, str) else named
    if not isinstance(found, type):
        raise _broken(selection, f'{what} = "{named}" is not a class but {type(found).__name__}', None)
    return found


def _attribute(selection: Selection, what: str, dotted: str) -> Any:
    module_name, _, name = dotted.partition(":")
    try:
        module = importlib.import_module(module_name)
    except EnginesError:
        raise
    except (Exception, SystemExit) as error:  # an import runs anybody's code
        raise _broken(selection, f'{what} = "{dotted}": importing it raised {_said(error)}', error) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise _broken(selection, f'{what} = "{dotted}": {module.__file__} has no {name}', None) from None


def _broken(selection: Selection, cause: str, error: BaseException | None) -> BrokenPlugin:
    return BrokenPlugin(
        selection.distribution,
        selection.plugin,
        _where(error) or selection.manifest,
        cause,
        _remedy(selection, error),
    )


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"SystemExit({error.code!r})"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _where(error: BaseException | None) -> str | None:
    """File and line that raised, or that isn't Python, if it is not the import system itself."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frame = error.__traceback__ if error is not None else None
    where = None
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith("<frozen ") and file not in (__file__, importlib.__file__):
            where = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return where


def _remedy(selection: Selection, error: BaseException | None) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        if top != _package(selection) and top not in sys.modules:
            return f"install {top}, and let its author add it to `needs`"
    if isinstance(error, SyntaxError):
        return f"mend that line if it is yours, else reinstall {selection.distribution}, or tell its author"
    if isinstance(error, SystemExit):
        return "something it imports ends the program, often because it parses sys.argv; tell its author"
    return f"upgrade {selection.distribution}, or tell its author"


def _package(selection: Selection) -> str:
    return selection.engine.partition(".")[0].partition(":")[0] if isinstance(selection.engine, str) else ""
