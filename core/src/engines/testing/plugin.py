"""The pytest plugin: `pytest --engine NAME`, and `conformance(...)` in a test module. Does nothing unless asked."""

from __future__ import annotations

from typing import Any

import pytest

from engines.testing.conformance import Conformance

ACTIVE = "engines-conformance"
"""The name under which the rest of the kit is registered, once it is asked for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engines", "conformance of training engines")
    group.addoption("--engine", metavar="NAME", help="hold this engine to the contract, and run no other tests")
    group.addoption("--device", metavar="NAME", help="of --engine; default: cpu where it runs there")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.engine is None:
        if config.option.device is not None:
            raise pytest.UsageError("--device says where --engine runs; there is no --engine")
        return
    if config.args_source is config.ArgsSource.ARGS:
        raise pytest.UsageError(
            f"--engine runs the conformance kit and nothing else, so that {' '.join(config.args)} would be ignored: "
            "leave out the paths, or --engine"
        )
    activate(config)


def pytest_collection(session: pytest.Session) -> bool | None:
    """With `--engine`, the kit alone."""
    option = session.config.option
    if option.engine is None:
        return None
    from engines.errors import EnginesError

    suite = _suite(session, option.engine, Conformance(option.engine, option.device, _setup_of(option.engine)))
    try:
        suite.find()
    except EnginesError as error:
        raise pytest.UsageError(str(error)) from None
    session.items = list(session.genitems(suite))
    hook = session.config.hook
    hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
    hook.pytest_collection_finish(session=session)
    session.testscollected = len(session.items)
    return True


def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> Any:
    """A `Conformance` of a test module is the whole kit, below its name."""
    if not isinstance(obj, Conformance):
        return None
    activate(collector.config)
    return _suite(collector, name, obj)


def activate(config: pytest.Config) -> None:
    """Register the rest of the kit, the first time that it is asked for."""
    from engines.testing import fixtures
    from engines.testing.active import Active

    if not config.pluginmanager.has_plugin(ACTIVE):
        config.pluginmanager.register(Active(config), ACTIVE)
        config.pluginmanager.register(fixtures, f"{ACTIVE}-fixtures")


def _suite(parent: pytest.Collector, name: str, asked: Conformance) -> Any:
    from engines.testing.collecting import Suite

    more = {"nodeid": f"conformance of {name}"} if isinstance(parent, pytest.Session) else {}
    return Suite.from_parent(parent, name=name, asked=asked, **more)


def _setup_of(engine: str) -> str | None:
    """The kit's own double is an engine too, but installed by nobody."""
    return "engines.testing.reference:register" if engine == "reference" else None
