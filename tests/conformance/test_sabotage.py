"""The kit catches what it claims: engines that break the contract in one way each, held to the whole of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.sabotage import SABOTAGES, Sabotage
from support.sabotage.table import SOUND

SETUP = "support.sabotage:register"
OTHERS = 3
"""How many clauses but the one that is named for a sabotage may notice it too."""


class Failures:
    """Notes which clauses failed, and what they said."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.ran = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed:
            clause = report.nodeid.rpartition("::")[2].partition("[")[0]
            self.said.setdefault(clause, str(report.longrepr)[-600:])


def run_kit(engine: str, folder: Path) -> Failures:
    """The whole kit in this process, in a folder that holds three lines."""
    lines = f"from engines.testing import conformance\n\ntests = conformance({engine!r}, setup={SETUP!r})\n"
    file = folder / "test_conformance.py"
    file.write_text(lines)
    failures = Failures()
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", "/dev/null"]
    pytest.main([*options, str(file)], plugins=[failures])
    return failures


@pytest.mark.more
@pytest.mark.timeout(900)
def test_a_sound_engine_of_several_processes(tmp_path: Path) -> None:
    failures = run_kit(SOUND, tmp_path)
    assert failures.ran > 80
    assert not failures.said


def test_they_are_at_least_fifteen() -> None:
    assert len(SABOTAGES) >= 15
    assert len({one.name for one in SABOTAGES}) == len(SABOTAGES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.more if one.often else pytest.mark.sabotage)
        for one in SABOTAGES
    ],
)
def test_it_is_caught(sabotage: Sabotage, tmp_path: Path) -> None:
    failures = run_kit(sabotage.name, tmp_path)
    caught = set(failures.said)
    assert sabotage.caught_by in caught, f"not caught by {sabotage.caught_by}, but by {failures.said}"
    assert len(caught - {sabotage.caught_by}) <= OTHERS, f"caught by {failures.said}"
