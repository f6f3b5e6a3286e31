"""One self-contained page: the verdict, the table, and the curves."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from engines.verifying.curves import draw
from engines.verifying.results import Report, Row, in_words
from engines.verifying.table import number, steps, tolerances, verdict

TEMPLATE = "page.html"


def check_writable(file: Path) -> None:
    """Raise `ConfigError` if the page can't be written there."""
    folder = file.absolute().parent
    if file.is_dir():
        raise ConfigError(f"--html: {file} is a folder", f"Name a file in it: {file / TEMPLATE}")
    if not folder.is_dir():
        raise ConfigError(f"--html: there is no folder {folder} to write {file.name} into")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"--html: {file} can't be written")


def write_page(report: Report, file: Path) -> None:
    """Write the page, whole or not at all."""
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("engines", "verifying"), autoescape=True).get_template(TEMPLATE)
    text = template.render(
        report=report,
        steps=steps(report),
        verdict=verdict(report),
        tolerances=list(tolerances(report)),
        rows=[_cells(row) for row in report.rows],
        failures=[f"{row.engine} at {row.layout}: {cause}" for row in report.rows for cause in row.causes],
        refusals=list(in_words(report.refusals)),
        pictures={
            model: draw(report, model) for model in dict.fromkeys(row.model for row in report.rows if row.trained)
        },
    )
    part = file.with_name(f".{file.name}.part")
    part.write_text(text)
    part.replace(file)


def _cells(row: Row) -> dict[str, Any]:
    """What the template shows of a row; `numbers`: pairs of text, and whether it is within the tolerance."""
    numbers = [("-", False)] * 4
    if row.differences is not None:
        numbers = [(number(value), row.verdicts()[name]) for name, value in asdict(row.differences).items()]
    return {"row": row, "numbers": numbers}
