"""The conformance kit's clauses, from the modules that hold them; nothing of the kit is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from documenting import ROOT
from documenting.tables import code, table

CLAUSES = ROOT / "core/src/engines/testing/clauses"


def clause_tables() -> str:
    """A section for each module: what it is about, and each of its clauses with where the contract has it."""
    sections = [_section(ast.parse(file.read_text()), file.stem) for file in sorted(CLAUSES.glob("test_*.py"))]
    return "\n".join(section for section in sections if section) or "No clause is written yet.\n"


def _section(tree: ast.Module, stem: str) -> str:
    rows = [(f"`{name}`", _wanted(wants, where, needs)) for name, wants, where, needs in _clauses(tree)]
    if not rows:
        return ""
    title = stem.removeprefix("test_").replace("_", " ")
    heading = f"### {title[0].upper()}{title[1:]}"
    return f"{heading}\n\n{_first_paragraph(tree)}\n\n{table(('clause', 'what the contract wants'), rows)}"


def _wanted(wants: str, where: str, needs: list[str]) -> str:
    """With where it is written, and which engines it concerns, if not all."""
    return f"{wants} *{where}*" + (f" With {code(needs)}." if needs else "")


def _clauses(tree: ast.Module) -> Iterator[tuple[str, str, str, list[str]]]:
    """Name, first paragraph of the docstring, where it is written, capabilities that it needs."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            where, needs = _decorated(node)
            yield node.name.removeprefix("test_"), _first_paragraph(node), where, needs


def _decorated(node: ast.FunctionDef) -> tuple[str, list[str]]:
    """The arguments of `@clause(where, needs=...)`."""
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and getattr(one.func, "id", None) == "clause":
            needs = next((ast.literal_eval(word.value) for word in one.keywords if word.arg == "needs"), ())
            return _linked(ast.literal_eval(one.args[0])), sorted(needs)
    return "", []


def _linked(where: str) -> str:
    """A page of the documentation, or the one with the docstring, as a link; a docstring without page by its name."""
    page, _, anchor = where.partition(".md#")
    if anchor:
        return f"[{page}: {anchor.replace('-', ' ')}]({where})"
    module, _, name = where.partition(":")
    shown = SHOWN_ON.get(f"{module}.{name.partition('.')[0]}")
    return f"[`{where}`](api/{shown}#{module}.{name})" if shown else f"`{where}`"


def _shown_on() -> dict[str, str]:
    """Every class and function that a page of docs/api shows, and that page."""
    found = {}
    for page in sorted(ROOT.glob("docs/api/*.md")):
        for module, options in re.findall(r"^::: ([\w.]+)\n((?: .*\n?)*)", page.read_text(), re.MULTILINE):
            found |= {f"{module}.{name}": page.name for name in re.findall(r"^ +- (\w+)$", options, re.MULTILINE)}
    return found


SHOWN_ON = _shown_on()


def _first_paragraph(node: ast.Module | ast.FunctionDef) -> str:
    text = ast.get_docstring(node)
    assert text, f"{getattr(node, 'name', 'a module of clauses')} has no docstring"
    return " ".join(text.partition("\n\n")[0].split())
