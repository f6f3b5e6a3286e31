"""The clauses as a whole: what they are about, and what none of them is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from engines.capabilities import CAPABILITIES
from engines.testing import clauses
from engines.testing.clause import Clause, clause_of
from engines.testing.layouts import LAYOUTS
from support.sabotage import SABOTAGES

PAGE = Path(__file__).parents[2] / "docs/conformance.md"
UNPROVEN = {"lora", "router_replay"}
"""Capabilities that an engine may declare and the kit has no clause about, as the report and its page say."""


def every_clause() -> dict[str, Clause]:
    """By name, less `test_`."""
    files = sorted(Path(clauses.__path__[0]).glob("test_*.py"))
    chapters = [vars(import_module(f"{clauses.__name__}.{file.stem}")) for file in files]
    return {
        name.removeprefix("test_"): clause
        for chapter in chapters
        for name, function in chapter.items()
        if (clause := clause_of(function)) is not None
    }


def test_every_capability_has_a_clause_or_is_said_to_have_none() -> None:
    proven = set[str]().union(*(one.needs for one in (*every_clause().values(), *LAYOUTS)))
    assert CAPABILITIES.keys() - proven == UNPROVEN
    assert all(f"`{capability}`" in PAGE.read_text() for capability in UNPROVEN)


def test_every_sabotage_is_caught_by_a_clause_that_there_is() -> None:
    assert {one.caught_by for one in SABOTAGES} <= every_clause().keys()
