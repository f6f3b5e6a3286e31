"""How pytest collects the kit: a suite for each engine, below it a chapter for each file of clauses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines.errors import EnginesError
from engines.testing import fixtures
from engines.testing.asking import can_be_asked_for
from engines.testing.clause import clause_of
from engines.testing.conformance import Conformance
from engines.testing.report import Report
from engines.testing.subject import Subject, find

CLAUSES = "engines.testing.clauses"
REPORT = pytest.StashKey[Report]()
pytest.register_assert_rewrite(CLAUSES)


class Suite(pytest.Collector):
    """The kit for one engine."""

    def __init__(self, *, asked: Conformance, **node: Any) -> None:
        super().__init__(**node)
        self.asked = asked
        self._subject: Subject | None = None

    def find(self) -> Subject:
        """The engine; looked up once. Raises `EnginesError` if it isn't there."""
        if self._subject is None:
            with tempfile.TemporaryDirectory() as scratch:
                self._subject = find(self.asked, Path(scratch))
                # while the folders are there that its config may want to read
                _ = self._subject.families, self._subject.mixtures, self._subject.layouts
            report_of(self.config).add(self._subject)
        return self._subject

    def collect(self) -> Iterator[pytest.Collector]:
        try:
            subject = self.find()
        except EnginesError as error:
            raise self.CollectError(str(error)) from None
        fixtures.register(self, subject)
        folder = Path(str(import_module(CLAUSES).__file__)).parent
        for file in sorted(folder.glob("test_*.py")):
            name = file.stem.removeprefix("test_")
            yield Chapter.from_parent(self, path=file, name=name, nodeid=f"{self.nodeid}::{name}")


class Chapter(pytest.Module):
    """One file of clauses, for one engine; leaves out those that say nothing about it, and reports why."""

    def _getobj(self) -> ModuleType:
        return import_module(f"{CLAUSES}.{self.path.stem}")

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        subject, report = subject_of(self), report_of(self.config)
        for item in super().collect():
            clause = clause_of(getattr(item, "obj", None))
            assert clause is not None, f"{item.nodeid} is no clause"
            reason = clause.says_nothing_about(subject) or _lacks(item, subject)
            if reason is None:
                yield item
            else:
                report.leave_out(subject, item, reason)


def _lacks(item: pytest.Item | pytest.Collector, subject: Subject) -> str | None:
    """Why there is no value for a parameter of the clause; None if there is."""
    parameters = getattr(item, "fixturenames", ())
    if "parallel_layout" in parameters and not any(one.processes > 1 for one in subject.layouts):
        return "it runs in one process"
    if "undeclared" in parameters and can_be_asked_for(subject.config) <= subject.capabilities:
        return "it declares everything"
    return None


def subject_of(node: pytest.Item | pytest.Collector) -> Subject:
    """The engine that a test or chapter is about."""
    suite = node.getparent(Suite)
    assert suite is not None
    return suite.find()


def report_of(config: pytest.Config) -> Report:
    """The report of this session."""
    return config.stash[REPORT]
