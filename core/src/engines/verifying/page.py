"""One self-contained page: the verdict, the table, and the curves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from engines.verifying.curves import draw
from engines.verifying.results import Report, Row, in_words
from engines.verifying.table import number, steps, tolerances, verdict

TEMPLATE = "page.html"


def check_writable(file: Path) -> None:
    """Raise `ConfigError` if the page can't be written there; tried, since permissions don't tell all."""
    try:
        if file.is_dir():
            raise ConfigError(f"--html: {file} is a folder", f"Name a file in it: {file / TEMPLATE}")
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"--html: there is no folder {file.absolute().parent} to write {file.name} into")
        part = _part(file)
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigError(f"--html: {file} can't be written: {error.strerror}") from None


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
    part = _part(file)
    part.write_text(text)
    part.replace(file)


def _part(file: Path) -> Path:
    return file.with_name(f".{file.name}.part")


def _cells(row: Row) -> dict[str, Any]:
    """What the template shows of a row; `numbers`: pairs of text, and whether it is within the tolerance."""
    numbers = [("-", False)] * 4
    if row.differences is not None:
        numbers = [(number(value), row.verdicts()[name]) for name, value in asdict(row.differences).items()]
    return {"row": row, "numbers": numbers}
