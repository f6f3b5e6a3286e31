"""The list of decisions, from the pages themselves."""

from __future__ import annotations

from documenting import ROOT


def decision_list() -> str:
    """Every page of docs/decisions/, by its title."""
    pages = sorted(page for page in ROOT.glob("docs/decisions/*.md") if page.name != "index.md")
    return "\n".join(f"* [{page.read_text().splitlines()[0].removeprefix('# ')}]({page.name})" for page in pages)
