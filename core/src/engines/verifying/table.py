"""The table, and below it what has to be said in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from engines.verifying.numbers import Numbers
from engines.verifying.results import Report, Row, in_words

HEADINGS = ("ENGINE", "LAYOUT", "LOSS", "GRAD NORM", "WEIGHTS", "EXPORTED", "SECONDS", "")
PIPED_WIDTH = 120


def print_report(report: Report) -> None:
    """To standard output: in colour and as wide as a terminal, plain where it isn't one."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, no_color=True, width=PIPED_WIDTH)
    for line in preface(report):
        console.print(line, style="dim")
    console.print()
    with console.capture() as captured:
        console.print(_table(report), soft_wrap=False)
    print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n", end="\n\n")
    for line in remarks(report):
        console.print(line)
    console.print(verdict(report), style="green" if report.passed else "bold red")


def preface(report: Report) -> Iterator[str]:
    """What was compared."""
    yield f"Largest relative differences from {report.against} in {steps(report)} of 8 samples, float32."
    yield f"{_models(report)}."
    yield from tolerances(report)


def tolerances(report: Report) -> Iterator[str]:
    """Those of all models, and of models that have others."""
    raised = {row.model: row.tolerance for row in report.rows if row.tolerance != report.tolerances}
    yield f"Tolerances: {_named(report.tolerances)}."
    for model, tolerance in raised.items():
        yield f"Of {model}, which magnifies rounding: {_named(tolerance)}."


def _named(numbers: Numbers) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.0e}" for name, value in asdict(numbers).items())


def steps(report: Report) -> str:
    """How many."""
    return "1 step" if report.steps == 1 else f"{report.steps} steps"


def _models(report: Report) -> str:
    """Which models were trained, and those of few layouts where."""
    layouts: dict[str, list[str]] = {}
    for row in report.rows:
        names = layouts.setdefault(row.model, [])
        if row.layout not in names:
            names.append(row.layout)
    first, *others = sorted(layouts, key=lambda name: -len(layouts[name]))
    return "Model: " + "; ".join([first, *(f"{name} at {' and '.join(layouts[name])}" for name in others)])


def remarks(report: Report) -> Iterator[str]:
    """Why runs failed whose numbers don't say it, and what wasn't run."""
    said = [f"failed   {row.engine} at {row.layout}: {cause}" for row in report.rows for cause in row.causes]
    said += [f"refused  {line}" for line in in_words(report.refusals)]
    yield from [*said, ""] if said else []


def verdict(report: Report) -> str:
    """One line."""
    failed = [row for row in report.rows if not row.passed]
    if not failed:
        runs = "The run passes" if len(report.rows) == 1 else f"All {len(report.rows)} runs pass"
        return f"{runs}: the same model is trained as by {report.against}."
    who = list(dict.fromkeys(row.engine for row in failed))
    return f"{len(failed)} of {len(report.rows)} runs failed: {', '.join(who)}."


def number(value: float) -> str:
    """A difference as one reads it."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "inf"


def _table(report: Report) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("ENGINE", "LAYOUT", "") else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(row.engine, row.layout, *_numbers(row), f"{row.seconds:.1f}", _verdict(row))
    return table


def _numbers(row: Row) -> list[Any]:
    from rich.text import Text

    if row.differences is None:
        return ["-"] * 4
    good = row.verdicts()
    return [
        Text(number(value), style="" if good[name] else "bold red") for name, value in asdict(row.differences).items()
    ]


def _verdict(row: Row) -> Any:
    from rich.text import Text

    return Text("passed", style="green") if row.passed else Text("FAILED", style="bold red")
