"""Pieces of real source, shown where the prose speaks of them."""

from __future__ import annotations

import ast
from textwrap import dedent

from documenting import ROOT

LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".jsonl": "json"}


def source(path: str, *names: str) -> str:
    """A file, or what `names` (`function`, `Class`, `Class.method`) define in it, in that order."""
    file = ROOT / path
    text = file.read_text()
    shown = "\n\n".join(_definition(text, name, path) for name in names) if names else text
    return fenced(shown, file.suffix)


def signatures(path: str, *names: str) -> str:
    """What `names` define in a file, without bodies: signatures, and what the docstrings say first."""
    tree = ast.parse((ROOT / path).read_text())
    return fenced("\n\n".join(ast.unparse(_stub(_find(tree, name, path))) for name in names), ".py")


def _stub(node):
    members = [one for one in node.body if _name(one).strip("_") == "init" or _is_public(one)]
    said = (ast.get_docstring(node) or "").partition("\n\n")[0]
    summary = [ast.Expr(ast.Constant(" ".join(said.split()) or ...))]
    node.body = summary + [_stub(one) for one in members] if isinstance(node, ast.ClassDef) else summary
    return node


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def fenced(text: str, suffix: str, title: str = "") -> str:
    """A block of code in the language of files with that suffix."""
    named = f' title="{title}"' if title else ""
    return f"```{LANGUAGES[suffix]}{named}\n{text.strip(chr(10))}\n```\n"


def docstring(path: str, part: str = "") -> str:
    """The indented block of a module's docstring, or of one of its definitions."""
    tree = ast.parse((ROOT / path).read_text())
    node = _find(tree, part, path) if part else tree
    text = ast.get_docstring(node)
    assert text, f"{path} {part} has no docstring"
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    return f"```text\n{dedent(chr(10).join(lines))}\n```\n"


def _definition(text: str, name: str, path: str) -> str:
    """The lines of a definition, its decorators included, moved to the left margin."""
    node = _find(ast.parse(text), name, path)
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)])
    return dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _find(tree: ast.AST, name: str, path: str):
    node = tree
    for word in name.split("."):
        inner = {_name(one): one for one in getattr(node, "body", [])}
        assert word in inner, f"{path} defines no {name}"
        node = inner[word]
    return node


def _name(node: ast.stmt) -> str:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case _:
            return getattr(node, "name", "")
