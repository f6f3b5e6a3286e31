"""Write the tables of keys in docs/recipe.md from the settings' own classes.

Usage: python tools/document_recipe.py [--check]
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from engines.config import EngineConfig
from engines.recipes.reference import key_table, row
from engines.registry import registry

PAGE = Path(__file__).parents[1] / "docs/recipe.md"
MARK = "<!-- Below: written by `make docs` from the settings' classes. -->\n"


def document() -> str:
    """The page with tables that fit the code."""
    head, mark, _ = PAGE.read_text().partition(MARK)
    assert mark, f"{PAGE} has lost its mark"
    tables = {**key_table(), **engine_tables()}
    return head + mark + "".join(f"\n## {title}\n\n{table(rows)}" for title, rows in tables.items())


def engine_tables() -> dict[str, list[tuple[str, str]]]:
    """The keys that each installed engine adds under `engine:`, to those of the engine that it builds on."""
    tables = {}
    for backend, path in sorted({(one.backend, str(one.config)) for one in registry.candidates()}):
        module, _, name = path.partition(":")
        settings = getattr(import_module(module), name)
        inherited = settings.__base__.model_fields
        own = [row(f"engine.{key}", info) for key, info in settings.model_fields.items() if key not in inherited]
        if own:
            where = "" if settings.__base__ is EngineConfig else f" on {devices(path)}"
            tables[f"What {backend} adds{where}"] = own
    return tables


def devices(config: str) -> str:
    """Where engines have these settings."""
    return ", ".join(sorted({one.device for one in registry.candidates() if one.config == config}))


def table(rows: list[tuple[str, str]]) -> str:
    lines = ["| key | type = default | meaning |", "|---|---|---|"]
    for key, meaning in rows:
        name, _, kind = key.partition(": ")
        lines.append(f"| `{name}` | {escape(kind)} | {escape(meaning)} |")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<=", "&le;")


if __name__ == "__main__":
    page = document()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        raise SystemExit(f"{PAGE.name} doesn't fit the settings any more; run `make docs`")
