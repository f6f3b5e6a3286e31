"""The whole kit on one engine, in this process, with all that such runs may share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines.testing.fixtures import Model, PlainRun
from engines.testing.world import Worlds
from support.sabotage.table import ROOM, Sabotage

FILE = f"""
from engines.testing import conformance
from {__name__} import kit_models, kit_plain_runs, kit_worlds

tests = conformance({{engine!r}}, setup="{ROOM}:register")
"""
"""What an author writes, but for the fixtures of the kit that outlive a session here."""


@dataclass(frozen=True)
class Shared:
    """What takes long to make, and that no engine changes."""

    worlds: Worlds
    model: Model
    plain_run: PlainRun


@dataclass
class Outcome:
    """What became of the kit's tests; a plugin of the session that runs them."""

    shared: Shared
    tests: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """The end of what a clause said, by its name less `test_`; that of one of its tests, if several failed."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[SHARED] = self.shared

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call"
        if report.failed:
            clause = report.nodeid.rpartition("::test_")[2].partition("[")[0]
            self.failures.setdefault(clause, report.longreprtext[-600:])

    def __str__(self) -> str:
        return "\n".join(f"{clause}: {said}" for clause, said in self.failures.items()) or "nothing"


SHARED = pytest.StashKey[Shared]()


def run_kit(sabotage: Sabotage, shared: Shared, folder: Path) -> Outcome:
    """The kit's session for an engine that is registered, in the empty `folder`."""
    file = (
        folder / f"test_{sabotage.name}.py"
    )  # pytest takes two files of one name for the same, though folders differ
    file.write_text(FILE.format(engine=sabotage.name))
    outcome = Outcome(shared)
    settings = {"rootdir": folder, "confcutdir": folder, "basetemp": folder / "temporary", "import-mode": "importlib"}
    options = [f"--{name}={value}" for name, value in settings.items()]
    code = pytest.main([*options, "-c/dev/null", "-q", "-pno:cacheprovider", str(file)], plugins=[outcome])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"the kit did not run: {code!r}"
    return outcome


@pytest.fixture(scope="session")
def kit_worlds(request: pytest.FixtureRequest) -> Worlds:
    return _shared(request).worlds


@pytest.fixture(scope="session")
def kit_models(request: pytest.FixtureRequest) -> Model:
    return _shared(request).model


@pytest.fixture(scope="session")
def kit_plain_runs(request: pytest.FixtureRequest) -> PlainRun:
    return _shared(request).plain_run


def _shared(request: pytest.FixtureRequest) -> Shared:
    return request.config.stash[SHARED]
