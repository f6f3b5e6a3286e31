"""Messages of the troubleshooting page are messages of the code, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

import engines.errors
from documenting import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\*\*`(.+)`\*\*$", PAGE, re.MULTILINE)
GAP = "\0"


@cache
def said_by_the_code() -> tuple[str, ...]:
    """Every string of core and plugins, with a gap for each value that is put in."""
    files = [*ROOT.glob("core/src/engines/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    trees = (ast.walk(ast.parse(file.read_text())) for file in files)
    return tuple(text for nodes in trees for node in nodes if (text := "".join(_parts(node))))


def _parts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield from (part for value in values for part in _parts(value))
        case ast.FormattedValue():
            yield GAP


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_it(message: str) -> None:
    pieces = (re.escape(piece) for piece in message.split("..."))
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    assert any(pattern.search(text) for text in said_by_the_code())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 60


def test_the_tree_of_errors_is_whole() -> None:
    tree = PAGE.partition("## The tree of errors")[2]
    names = {
        name
        for name, one in vars(engines.errors).items()
        if isinstance(one, type) and issubclass(one, engines.errors.EnginesError)
    }
    assert names == set(re.findall(r"\b[A-Z][A-Za-z]+(?:Error|NotFound|Plugin)\b", tree.partition("```text")[2])) - {
        "ValueError"
    }
