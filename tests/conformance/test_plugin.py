"""The kit as a plugin of pytest: what an author's own tests meet of it, and it of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("subject", "on_ranks", "once_on_ranks", "model", "plain_run", "layout", "some_layout", "any_model")
"""Fixtures and parameters of the kit's clauses that have names for everybody."""

CONFTEST = """
import pytest

@pytest.fixture(params=["the author's"])
def {name}(request):
    return request.param
"""
OWN = """
def test_{name}_is_its_own({name}):
    assert {name} == "the author's"
"""
KIT = """
from engines.testing import conformance

tests = conformance("reference", setup="engines.testing.reference:register")
again = conformance("reference", setup="engines.testing.reference:register")
"""
VENDOR = """
from engines.config import EngineConfig, needs
from engines.testing.reference import REFERENCE


class VendorConfig(EngineConfig):
    fast: bool = needs("x-vendor.fast", False, "Declared.")
    loose: int = needs("x-vendor.loose", 3, "Not declared, so that core refuses it.")


def register():
    from engines.registry import registry

    mine = {"backend": "vendor", "config": f"{__name__}:VendorConfig", "capabilities": ("entropy", "x-vendor.fast")}
    if not any(one.backend == "vendor" for one in registry.candidates()):
        registry.register(**{**REFERENCE, **mine})
"""


def run_pytest(folder: Path, *words: str) -> str:
    """What a session of an author's says."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.more
def test_fixtures_of_the_kit_and_of_an_author_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("".join(CONFTEST.format(name=name) for name in NAMES))
    (tmp_path / "test_own.py").write_text("".join(OWN.format(name=name) for name in NAMES))
    (tmp_path / "test_kit.py").write_text(KIT)
    clauses = "training_equals_plain or leaves_no_trace"
    said = run_pytest(tmp_path, "-k", f"is_its_own or {clauses}")
    assert all(f"test_{name}_is_its_own[the author's] PASSED" in said for name in NAMES), said
    for suite in ("tests", "again"):
        assert f"test_kit.py::{suite}::training::test_training_equals_plain_pytorch[single] PASSED" in said


@pytest.mark.more
def test_the_report_knows_words_of_a_vendor_and_that_it_is_a_part(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vendor.py").write_text(VENDOR)
    (tmp_path / "test_kit.py").write_text(
        KIT.partition("again")[0].replace("reference", "vendor", 1).replace("engines.testing.reference", "vendor")
    )
    clauses = "(not_declared_is_refused and (loose or export)) or entropy_is_that or training_equals_plain"
    said = run_pytest(tmp_path, "-k", clauses)
    assert "training_equals_plain_pytorch[single] PASSED" in said, "it exports nothing, which it needn't"
    report = said[said.index("vendor on cpu") :]
    assert re.search(r"^x-vendor.fast +declared; what it means is the vendor's", report, re.MULTILINE), report
    assert re.search(r"^x-vendor.loose +refused by 1 test$", report, re.MULTILINE), report
    assert re.search(r"^entropy +proven by 1 test$", report, re.MULTILINE), report
    assert re.search(r"^not in this run +data_parallel, tensor_parallel, ", report, re.MULTILINE), report
    assert "a whole run says which" in report and "it doesn't declare" not in report
