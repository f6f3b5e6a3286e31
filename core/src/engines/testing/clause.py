"""Marks a test as a clause of the contract, and says where the contract has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engines.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from engines.testing.subject import Subject

F = TypeVar("F", bound=Callable[..., None])
MARK = "__engines_clause__"
Unless = Callable[["Subject"], str | None]
"""Why a clause says nothing about an engine, for the report; None if it does."""


@dataclass(frozen=True)
class Clause:
    """What a test of the kit proves."""

    where: str
    """`package.module:Name`, whose docstring has the rule, or `page.md#heading` of the documentation."""
    needs: frozenset[str]
    """Capabilities without which it says nothing about an engine."""
    wants: str
    """What the contract wants, in the words of the test's docstring."""
    unless: Unless | None = None
    """What else must hold of an engine."""

    def says_nothing_about(self, subject: Subject) -> str | None:
        """Why it is not applicable to an engine; None if it is."""
        lacking = sorted(self.needs - subject.capabilities)
        if lacking:
            return f"it doesn't declare {', '.join(lacking)}"
        return self.unless(subject) if self.unless is not None else None


def clause(where: str, *, needs: Iterable[str] = (), unless: Unless | None = None) -> Callable[[F], F]:
    """Make a test function a clause. Its name says what holds, its docstring what the contract wants."""
    words = frozenset(needs)
    assert words <= CAPABILITIES.keys(), f"unknown capabilities {sorted(words - CAPABILITIES.keys())}"

    def mark(function: F) -> F:
        wants = inspect.getdoc(function)
        assert wants, f"{function.__name__} must say in its docstring what the contract wants"
        setattr(function, MARK, Clause(where, words, wants, unless))
        return function

    return mark


def clause_of(function: Any) -> Clause | None:
    """The clause that a test function is, if it is one."""
    found: Clause | None = getattr(function, MARK, None)
    return found
