"""Both engines on simulated NPUs, held to what a device can break, by the command that an author types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_npu.installing import PYTHONPATH
from support.mindspeed import make_site

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]

CLAUSES = "training_equals_plain or newest_weights or process_is_left_as_it_was"
"""Words of the clauses that run here: the simulated device is too slow for all."""


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_it_keeps_the_contract(engine: str, simulated_npu: Path, tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", torch_npu=None)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--engine",
            engine,
            "--device",
            "npu",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            CLAUSES,
        ],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((PYTHONPATH, str(site))), "ENGINES_DEVICE": "npu"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "FAILED" not in done.stdout
