"""Write what the pages of docs/ say of the code, and tests/docs/public_api.txt, from the code itself.

Usage: python tools/generate_docs.py [--check]

A page marks what is generated, everything else in it is written by hand:

    <!-- generated: settings recipe -->
    ...
    <!-- until here -->

With `--check` nothing is written; what is stale is named, and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from documenting import ROOT, regions
from documenting.capabilities import capability_matrix, capability_words, engine_facts
from documenting.clauses import clause_tables
from documenting.commands import command_output, commands_help
from documenting.decisions import decision_list
from documenting.manifest import manifest_tables
from documenting.public_api import public_api
from documenting.scaffold import scaffold
from documenting.settings import settings_tables
from documenting.sources import docstring, signatures, source

WRITERS: dict[str, Callable[..., str]] = {
    "capabilities": capability_words,
    "clauses": clause_tables,
    "commands": commands_help,
    "decisions": decision_list,
    "docstring": docstring,
    "engine": engine_facts,
    "engines": capability_matrix,
    "manifest": manifest_tables,
    "output": command_output,
    "scaffold": scaffold,
    "settings": settings_tables,
    "signatures": signatures,
    "source": source,
}
"""What can stand behind `generated:`; the words after it are the arguments."""

PUBLIC_API = ROOT / "tests/docs/public_api.txt"


def generated() -> Iterator[tuple[Path, str]]:
    """Every file that holds something generated, and what it should hold."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = page.read_text()
        if regions.MARK in text:
            yield page, regions.rewritten(text, WRITERS, page.name)
    yield PUBLIC_API, public_api()


def main(check: bool) -> int:
    stale = [(path, text) for path, text in generated() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} {'does not fit the code any more; run `make docs`' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
