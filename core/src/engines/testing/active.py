"""What the kit adds to a session of pytest that asks for it: layouts as parameters, reasons to failures, a report."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

from engines.testing.asking import can_be_asked_for
from engines.testing.clause import clause_of
from engines.testing.collecting import REPORT, Chapter, subject_of
from engines.testing.layouts import SINGLE, Layout
from engines.testing.report import Report

FEW = 3
"""Layouts at which the longer clauses run."""


class Active:
    """The hooks of a session in which the kit runs."""

    def __init__(self, config: pytest.Config) -> None:
        self.report = config.stash[REPORT] = Report()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """`layout`: every layout of the engine; `some_layout`: a few; `parallel_layout`: a few of several ranks;
        `any_model`: every model that it builds; `undeclared`: every capability that it must refuse.
        """
        if not isinstance(metafunc.definition.getparent(pytest.Module), Chapter):
            return
        subject = subject_of(metafunc.definition)
        several = _diverse([one for one in subject.layouts if one.processes > 1])
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", subject.layouts, ids=str)
        if "some_layout" in metafunc.fixturenames:
            metafunc.parametrize("some_layout", [SINGLE, *several[: FEW - 1]], ids=str)
        if "any_model" in metafunc.fixturenames:
            metafunc.parametrize("any_model", [*subject.families, *subject.mixtures])
        if "undeclared" in metafunc.fixturenames:
            metafunc.parametrize("undeclared", sorted(can_be_asked_for(subject.config) - subject.capabilities))
        if "parallel_layout" in metafunc.fixturenames:
            metafunc.parametrize("parallel_layout", several[:FEW], ids=str)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A failure says what the contract wants, and where it is written."""
        result = yield
        clause = clause_of(getattr(item, "obj", None))
        if clause is None:
            return result
        if result.failed:
            result.sections.append(("what the contract wants", f"{clause.wants}\n\nWritten in {clause.where}"))
        self.report.note(subject_of(item), item, clause, result)
        return result

    def pytest_deselected(self) -> None:
        """`-k`, `-m` or `--deselect` left out some tests."""
        self.report.is_partial = True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What is proven, refused and not applicable."""
        self.report.write(terminalreporter)


def _diverse(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts, those first that bring most capabilities which none before them has."""
    left, ordered, seen = list(layouts), list[Layout](), set[str]()
    while left:
        best = max(left, key=lambda one: (len(one.needs - seen), -one.processes))
        left.remove(best)
        ordered.append(best)
        seen |= best.needs
    return ordered
