"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under headings, one line each; what would end a cell is escaped."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def code(words: Iterable[str]) -> str:
    """Words as code, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<=", "&le;")
