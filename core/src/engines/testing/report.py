"""What the kit found: which capabilities are proven, which are refused, what says nothing about the engine."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from engines.capabilities import CAPABILITIES
from engines.testing.asking import can_be_asked_for
from engines.testing.clause import Clause
from engines.testing.layouts import Layout
from engines.testing.subject import Subject

NOT_RUN = "not in this run"
HARD = "\0"
"""Stands for a space at which no line ends."""
WIDTH = 28
"""Of the column of capabilities."""


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
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Clauses that say nothing about it, by the reason."""


class Report:
    """Collects what a session finds, and writes it at the end."""

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}
        self.is_partial = False
        """Whether tests were deselected, so that what this run doesn't prove may be proven all the same."""

    def add(self, subject: Subject) -> None:
        """An engine is looked at."""
        self._found.setdefault(subject.name, Found(subject))

    def leave_out(self, subject: Subject, item: pytest.Item | pytest.Collector, reason: str) -> None:
        """A clause says nothing about the engine."""
        name = getattr(item, "originalname", None) or item.name
        clauses = self._found[subject.name].left_out[reason]
        if (clause := name.removeprefix("test_")) not in clauses:  # two modules may ask for one engine
            clauses.append(clause)

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
                _write(found, self.is_partial, terminal)


def _write(found: Found, is_partial: bool, terminal: pytest.TerminalReporter) -> None:
    subject = found.subject
    terminal.section(f"{subject.name} ({subject.selection.distribution} {subject.selection.version}".rstrip() + ")")
    for line in (*_wrapped("layouts", subject.layouts), *_wrapped("models", (*subject.families, *subject.mixtures))):
        terminal.line(line)
    for name, reason in subject.refusals.items():
        terminal.line(f"{f'refuses {name}':{WIDTH}}{' '.join(reason.split())}")
    terminal.line("")
    without_test = []
    for capability in _words(subject):
        verdict = _verdict(found, capability)
        if verdict is None:
            without_test.append(capability)
        else:
            terminal.line(f"{capability:{WIDTH}}{verdict}", red=verdict.startswith("FAILED"))
    for line in _without_test(without_test, found, is_partial):
        terminal.line(line)
    if found.left_out and is_partial:
        terminal.line("")
        terminal.line("This is a part of the kit; a whole run says which clauses are not applicable, and why.")
    elif found.left_out:
        terminal.line("")
        terminal.line("Clauses that are not applicable to this engine, since")
        for reason, clauses in found.left_out.items():
            terminal.line(f"  {reason}: {', '.join(clauses)}")


def _words(subject: Subject) -> list[str]:
    """The vocabulary, and the vendor's own words that the engine declares or its settings name."""
    known = subject.capabilities | can_be_asked_for(subject.config)
    return [*CAPABILITIES, *sorted(known - CAPABILITIES.keys())]


def _verdict(found: Found, capability: str) -> str | None:
    """What the tests of a capability came to; None if there was none."""
    declared = capability in found.subject.capabilities
    tests = (found.proofs if declared else found.refusals)[capability]
    ran = [found.outcomes[test] for test in tests if test in found.outcomes]
    if not ran:
        return None
    failed = len(ran) - sum(ran)
    if failed:
        what = "declared" if declared else "not declared, and must be refused"
        return f"FAILED: {what}; {failed} of {len(ran)} tests failed"
    word = "proven" if declared else "refused"
    return f"{word} by {len(ran)} test{'s' if len(ran) > 1 else ''}"


def _without_test(capabilities: Iterable[str], found: Found, is_partial: bool) -> Iterator[str]:
    """Why no test is about these."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for capability in capabilities:
        reasons[_why_no_test(capability, found.subject, is_partial)].append(capability)
    not_run = reasons.pop(NOT_RUN, [])
    for reason, words in reasons.items():
        yield from (f"{word:{WIDTH}}{reason}" for word in words)
    yield from _wrapped(NOT_RUN, not_run)


def _why_no_test(capability: str, subject: Subject, is_partial: bool) -> str:
    if capability in subject.capabilities and capability not in CAPABILITIES:
        return "declared; what it means is the vendor's to say, and to test"
    if capability not in subject.capabilities and capability not in can_be_asked_for(subject.config):
        return "not applicable: not declared, and there is nothing by which to ask for it"
    if is_partial:
        return NOT_RUN
    return f"{'' if capability in subject.capabilities else 'not '}declared, but no test of this run is about it"


def _wrapped(title: str, names: Iterable[object]) -> Iterator[str]:
    """Names behind a title, in the columns of the table; none of them broken."""
    words = ", ".join(str(name).replace(" ", HARD) for name in names)
    for index, line in enumerate(textwrap.wrap(words, 120 - WIDTH, break_on_hyphens=False)):
        yield f"{'' if index else title:{WIDTH}}{line}".replace(HARD, " ")
