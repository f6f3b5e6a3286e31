"""What docs/verify.md shows of the table is what the command prints of these numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engines.verifying.numbers import TOLERANCES, Numbers
from engines.verifying.results import Report, Row
from engines.verifying.table import print_report

PAGE = (Path(__file__).parents[2] / "docs/verify.md").read_text()
SHOWN = re.findall(r"^\$ (engines verify .*)\n(Largest(?:.|\n)*?)^```", PAGE, re.MULTILINE)
ROW = re.compile(r"^(\w+) +(\S+)" + r" +([\d.e-]+)" * 5 + r"  passed$", re.MULTILINE)


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_table_that_the_page_shows(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = re.findall(r"^Model: (.*)\.$", printed, re.MULTILINE)
    told = re.search(
        rf"^Of {re.escape(model)}, .*: loss (\S+), grad norm (\S+), weights (\S+), exported (\S+)\.$",
        printed,
        re.MULTILINE,
    )
    tolerance = Numbers(*map(float, told.groups())) if told else TOLERANCES
    rows = [
        Row(engine, layout, model, tolerance, float(seconds), Numbers(*map(float, differences)))
        for engine, layout, *differences, seconds in ROW.findall(printed)
    ]
    print_report(Report("reference", 3, TOLERANCES, rows, [], {}, {}))
    assert len(rows) == 2, command
    assert capsys.readouterr().out == printed
