"""Marks a test as a clause of the contract, and says where the contract has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from engines.capabilities import CAPABILITIES

F = TypeVar("F", bound=Callable[..., None])
MARK = "__engines_clause__"


@dataclass(frozen=True)
class Clause:
    """What a test of the kit proves."""

    where: str
    """`package.module:Name`, whose docstring has the rule, or `page.md#heading` of the documentation."""
    needs: frozenset[str]
    """Capabilities without which it says nothing about an engine."""
    wants: str
    """What the contract wants, in the words of the test's docstring."""


def clause(where: str, *, needs: Iterable[str] = ()) -> Callable[[F], F]:
    """Make a test function a clause. Its name says what holds, its docstring what the contract wants."""
    words = frozenset(needs)
    assert words <= CAPABILITIES.keys(), f"unknown capabilities {sorted(words - CAPABILITIES.keys())}"

    def mark(function: F) -> F:
        wants = inspect.getdoc(function)
        assert wants, f"{function.__name__} must say in its docstring what the contract wants"
        setattr(function, MARK, Clause(where, words, wants))
        return function

    return mark


def clause_of(function: Any) -> Clause | None:
    """The clause that a test function is, if it is one."""
    found: Clause | None = getattr(function, MARK, None)
    return found
