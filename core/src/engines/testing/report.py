"""What the kit found: which capabilities are proven, which are refused, what says nothing about the engine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from engines.capabilities import CAPABILITIES
from engines.testing.asking import can_be_asked_for
from engines.testing.clause import Clause
from engines.testing.layouts import Layout
from engines.testing.subject import Subject

REFUSAL = "refusals"
"""The chapter whose clauses prove that what isn't declared is refused; their parameter is the capability."""


@dataclass
class Found:
    """About one engine."""

    subject: Subject
    outcomes: dict[str, bool] = field(default_factory=dict)
    """Whether each test passed, by node id."""
    proofs: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Tests of each capability."""
    refusals: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Tests that each undeclared capability is refused."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Clauses that say nothing about it, each with the reason."""


class Report:
    """Collects what a session finds, and writes it at the end."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}

    def add(self, subject: Subject) -> None:
        """An engine is looked at."""
        self._found.setdefault(subject.name, Found(subject))

    def leave_out(self, subject: Subject, item: pytest.Item | pytest.Collector, reason: str) -> None:
        """A clause says nothing about the engine."""
        name = getattr(item, "originalname", None) or item.name
        self._found[subject.name].left_out[name] = reason

    def note(self, subject: Subject, item: pytest.Item, clause: Clause, result: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        found = self._found[subject.name]
        found.outcomes[item.nodeid] = found.outcomes.get(item.nodeid, True) and result.passed
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        capabilities = set(clause.needs)
        for value in parameters.values():
            if isinstance(value, Layout):
                capabilities |= value.needs
        for capability in capabilities:
            if item.nodeid not in found.proofs[capability]:
                found.proofs[capability].append(item.nodeid)
        refused = parameters.get("undeclared")
        if refused is not None and item.nodeid not in found.refusals[refused]:
            found.refusals[refused].append(item.nodeid)

    def write(self, terminal: pytest.TerminalReporter) -> None:
        """A table for each engine."""
        for found in self._found.values():
            if found.outcomes:
                _write(found, terminal)


def _write(found: Found, terminal: pytest.TerminalReporter) -> None:
    subject = found.subject
    terminal.section(f"{subject.name} ({subject.selection.distribution} {subject.selection.version}".rstrip() + ")")
    layouts, families = ", ".join(map(str, subject.layouts)), ", ".join((*subject.families, *subject.mixtures))
    terminal.line(f"layouts  {layouts}")
    terminal.line(f"models   {families}")
    for name, reason in subject.refusals.items():
        terminal.line(f"refused  {name}: {' '.join(reason.split())}")
    terminal.line("")
    for capability in CAPABILITIES:
        terminal.line(f"{capability:28}{_verdict(found, capability)}")
    if found.left_out:
        terminal.line("")
        terminal.line("not applicable to this engine:")
        for name, reason in found.left_out.items():
            terminal.line(f"  {name}: {reason}")


def _verdict(found: Found, capability: str) -> str:
    declared = capability in found.subject.capabilities
    tests = (found.proofs if declared else found.refusals)[capability]
    ran = [found.outcomes[test] for test in tests if test in found.outcomes]
    if not ran:
        if declared or capability in can_be_asked_for(found.subject.config):
            return f"{'' if declared else 'not '}declared, but no test of this run is about it"
        return "not declared, and there is nothing by which to ask for it"
    failed = len(ran) - sum(ran)
    if failed:
        what = "declared" if declared else "not declared, and must be refused"
        return f"FAILED: {what}; {failed} of {len(ran)} tests failed"
    word = "proven" if declared else "refused"
    return f"{word} by {len(ran)} test{'s' if len(ran) > 1 else ''}"
