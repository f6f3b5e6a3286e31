"""A plugin of pytest that writes down what became of each engine of a session, when its last test is done."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RECORDS = "SABOTAGE_RECORDS"
"""The variable that names the folder for a file of each engine."""

_found: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    engine = _found.setdefault(_engine(report.nodeid), {"tests": 0, "failures": {}})
    engine["tests"] += report.when == "call"
    if report.failed:
        clause = report.nodeid.rpartition("::test_")[2].partition("[")[0]
        engine["failures"].setdefault(clause, report.longreprtext[-600:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    engine = _engine(item.nodeid)
    if nextitem is None or _engine(nextitem.nodeid) != engine:
        unfinished = Path(os.environ[RECORDS], f"{engine}.part")
        unfinished.write_text(json.dumps(_found[engine]))
        unfinished.rename(unfinished.with_suffix(""))
    return result


def _engine(nodeid: str) -> str:
    """file::engine::chapter::test"""
    return nodeid.split("::")[1]
